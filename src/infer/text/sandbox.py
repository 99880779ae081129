"""The Jinja environment that chat templates render in: no way out to Python, and bounds on size and time.

Runs in the request's task, synchronously; owns nothing between two renderings. Imports jinja2: import it lazily.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context

MAX_CHARS = 16_000_000
"""No string or list that a template builds is longer; several times the longest context."""
MAX_BITS = 16_384
"""No integer that a template multiplies or raises to a power is longer; more could not be printed."""
MAX_SECONDS = 10.0

_deadline: ContextVar[float] = ContextVar("_deadline")


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Renderings inside raise `OverflowError` when they run longer."""
    token = _deadline.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _deadline.reset(token)


def compile_template(source: str) -> Template:
    """Compile one template; ValueError says what is wrong and in which line."""
    try:
        return TemplateSandbox().from_string(source)
    except TemplateSyntaxError as error:
        raise ValueError(f"line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise OverflowError(f"the template builds a text or list of {size} elements; at most {MAX_CHARS} are allowed")


def check_time() -> None:
    if time.monotonic() > _deadline.get(float("inf")):
        raise OverflowError("the template takes too long to render")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """What transformers gives chat templates, with every operation bounded that can grow a value or take time."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        # Not optimized: constant expressions are evaluated under the limits of a rendering, not while compiling.
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[GenerationTag, loopcontrols]
        )
        self.code_generator_class = _BoundedCode
        self.globals.update(
            raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_TemplateDict(), namespace=_Namespace
        )
        for name in ("center", "format", "indent", "join", "replace", "wordwrap", "batch", "slice", "truncate"):
            self.filters[name] = _bounded_filter(name, self.filters[name])
        self.filters["tojson"] = _tojson
        self.filters[TICK] = _tick

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):  # loops without output would otherwise never look at the clock
            tick = nodes.Filter(nodes.Const(None), TICK, [], [], None, None, lineno=loop.lineno)
            loop.body.insert(0, nodes.ExprStmt(tick, lineno=loop.lineno))
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_time()
        if operator == "*":
            for value, times in ((left, right), (right, left)):
                if isinstance(value, str | list | tuple) and isinstance(times, int):
                    check_size(len(value) * times)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() * abs(right))
        elif operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str):
            _check_widths(left)
            _check_numbers(right if isinstance(right, tuple) else (right,))
            check_size(len(left) + _total_length([right]))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        check_time()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_text_call(owner, getattr(__obj, "__name__", ""), (*args, *kwargs.values()))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Jinja hands out `text.format` wrapped; the bounds go around that."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None
        owner: str = value.__self__

        def bounded(*args: Any, **kwargs: Any) -> str:
            _check_text_call(owner, "format", (*args, *kwargs.values()))
            return wrapped(*args, **kwargs)

        return bounded

    def concat_bounded(self, values: Iterable[Any]) -> str:
        texts = [str(value) for value in values]
        check_size(sum(map(len, texts)))
        return "".join(texts)


LONG_WIDTH = re.compile(r"\d{7}|:[^{}]*\{|%[^a-zA-Z%]*\*")
TICK = "tick "  # not a name: no template can write or shadow it


@pass_context
def _tick(context: Context, value: Any) -> Any:
    check_time()
    return value


class _BoundedCode(CodeGenerator):
    """`a ~ b` goes through the environment, so that doubling a string in a loop meets the size limit."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concat_bounded((")
        for value in node.nodes:
            self.visit(value, frame)
            self.write(", ")
        self.write("))")


class GenerationTag(Extension):
    """`{% generation %}` marks the assistant's tokens for training; when rendering it is its body."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


class _TemplateDict:
    """`dict` without the class's attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(Namespace):
    """`namespace()` that stores no name with a leading underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args
        attributes = dict(*positional, **kwargs)
        for name in attributes:
            _check_attribute(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_attribute(name)
        super().__setitem__(name, value)


def _check_attribute(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace attribute {name!r} begins with an underscore")


def _check_text_call(owner: str, method: str, args: tuple[Any, ...]) -> None:
    """Methods of str whose result can be much longer than what goes in."""
    _check_numbers(args)
    if method == "replace" and len(args) >= 2:
        _check_replace(owner, *args[:2])
    elif method == "join" and args:
        check_size(_total_length(args[0]) + len(owner) * _length(args[0]))
    elif method == "format":
        _check_widths(owner)
        check_size(len(owner) + owner.count("{") * _total_length(args))
    elif method == "expandtabs":
        check_size(len(owner) + owner.count("\t") * max((arg for arg in args if isinstance(arg, int)), default=8))


def _check_replace(text: Any, old: Any, new: Any) -> None:
    text, old, new = str(text), str(old), str(new)
    check_size(len(text) + (text.count(old)) * max(0, len(new) - len(old)))


def _check_numbers(values: Iterable[Any]) -> None:
    """No width, count or indent beyond the limit."""
    for value in values:
        if isinstance(value, int):
            check_size(abs(value) if value.bit_length() < 64 else MAX_CHARS + 1)


def _check_bits(bits: int) -> None:
    if bits > MAX_BITS:
        raise OverflowError(f"the template computes an integer of {bits} bits; at most {MAX_BITS} are allowed")


def _check_widths(text: str) -> None:
    """Numbers in a format string are widths or precisions; so are arguments that it refers to inside a format."""
    if LONG_WIDTH.search(text):
        raise OverflowError(f"the template formats with a width that is too large or computed: {text[:80]!r}")


def _length(values: Any) -> int:
    return len(values) if hasattr(values, "__len__") else 0


def _total_length(values: Any) -> int:
    if isinstance(values, Mapping):
        values = values.values()
    if not hasattr(values, "__len__") or isinstance(values, str):
        return _length(values)
    return sum(len(value) if isinstance(value, str) else 1 for value in values)


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The built-in filter after its size is checked; markers such as `pass_eval_context` stay."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    def bounded(*args: Any, **kwargs: Any) -> Any:
        check_time()
        value, rest = args[first], (*args[first + 1 :], *kwargs.values())
        _check_numbers(rest)
        if name == "replace" and len(rest) >= 2:
            _check_replace(value, *rest[:2])
        elif name == "join":
            check_size(_total_length(value) + _length(value) * max((_length(arg) for arg in rest), default=0))
        elif name == "format":
            _check_widths(str(value))
            check_size(len(str(value)) + _total_length(rest))
        elif name == "indent" and rest and isinstance(rest[0], int):
            check_size(len(str(value)) + rest[0] * (str(value).count("\n") + 1))
        return function(*args, **kwargs)

    if first:
        bounded.jinja_pass_arg = function.jinja_pass_arg  # type: ignore[attr-defined]
    return bounded


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as transformers writes it: no HTML escapes, non-ASCII characters as they are."""
    check_time()
    if isinstance(indent, int) and indent > 64:
        raise OverflowError(f"tojson(indent={indent}): at most 64")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
