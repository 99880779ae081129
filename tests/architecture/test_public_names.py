"""What is promised: the names in `infer` and `infer.plugins`, the binding signatures, and the page that documents them."""

from __future__ import annotations

import ast
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

import infer
import infer.artifacts
import infer.plugins

ROOT = Path(__file__).parents[2]
BINDING = {  # docs: the public contract; a change here breaks callers
    "generate": ["prompt", "params", "request_id", "priority", "cache_salt", "artifact", "lora", "tools", "deadline"],
    "stream": ["prompt", "params", "request_id", "priority", "cache_salt", "artifact", "lora", "tools", "deadline"],
    "abort": ["request_id"],
}
SAMPLING = [
    *("max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty"),
    *("presence_penalty", "seed", "stop", "stop_token_ids", "include_stop", "skip_special_tokens", "ignore_eos"),
    "repetition_detection",
    *(
        "logit_bias",
        "allowed_token_ids",
        "bad_words",
        "logits_processors",
        "logprobs",
        "prompt_logprobs",
        "logprobs_mode",
    ),
    *("logprob_token_ids", "return_kept_set", "forced_token_ids", "structured_output", "thinking_budget"),
    "return_routed_experts",
    *("routed_experts_prompt_start", "captured_as", "beam", "n"),
]
PACKAGES = [infer, infer.plugins, infer.artifacts]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_every_public_name_resolves_and_is_listed_once(package: ModuleType) -> None:
    names = list(package.__all__)
    assert names == sorted(set(names), key=lambda name: (not name.isupper(), name)), "constants come first"
    for name in names:
        assert getattr(package, name) is not None
    assert set(names) <= set(dir(package))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = package.no_such_name


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_type_checkers_see_the_same_names(package: ModuleType) -> None:
    tree = ast.parse(Path(str(package.__file__)).read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = {alias.name for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    seen |= {ast.unparse(node.target) for node in block.body if isinstance(node, ast.AnnAssign)}
    assert seen == set(package.__all__)


def test_every_error_is_public() -> None:
    import infer.errors

    defined = {name for name, value in vars(infer.errors).items() if inspect.isclass(value)}
    assert defined == {name for name in infer.__all__ if name.endswith("Error")}
    for name in defined:
        assert issubclass(getattr(infer, name), infer.InferError)
        ancestors = getattr(infer, name).__mro__[:-3]  # Exception, BaseException, object
        assert {ancestor.__module__ for ancestor in ancestors} == {"infer.errors"}, f"{name} has a builtin as base"


def test_every_spec_and_contract_is_public() -> None:
    from infer.plugins.contracts import CONTRACTS

    for spec_type in (contract.spec_type for contract in CONTRACTS.values()):
        assert spec_type.__name__ in infer.plugins.__all__
        module = sys.modules[spec_type.__module__]
        promised = {
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")
        }
        assert promised <= set(infer.plugins.__all__)


@pytest.mark.parametrize("method", BINDING)
def test_the_binding_signatures(method: str) -> None:
    parameters = list(inspect.signature(getattr(infer.Engine, method)).parameters.values())[1:]
    assert [parameter.name for parameter in parameters] == BINDING[method]
    keyword_only = [parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    assert keyword_only == BINDING[method][2:]


def test_the_sampling_parameters_and_their_order() -> None:
    assert list(infer.SamplingParams.model_fields) == SAMPLING
    with pytest.raises(infer.InvalidRequestError, match="no_such"):
        infer.SamplingParams(no_such=1)  # type: ignore[call-arg]


def test_the_page_of_public_names_is_current() -> None:
    from integration.test_docs_pages import load_tool

    tool = load_tool("public_api")
    assert tool.PAGE.read_text("utf-8") == tool.render(), "run `make docs`, look at what changed, and commit the page"


def test_the_page_shows_a_changed_signature() -> None:
    from integration.test_docs_pages import load_tool

    tool = load_tool("public_api")
    before = ast.parse("def f(self, a: int, *, _hidden: int = 0, b: str = 'x') -> None: ...").body[0]
    after = ast.parse("def f(self, a: int, *, _hidden: int = 0, b: str = 'y') -> None: ...").body[0]
    assert tool.head(before) == "f(a: int, *, b: str='x') -> None"
    assert tool.head(after) != tool.head(before)


def test_the_version_is_the_installed_one() -> None:
    from importlib.metadata import version

    assert infer.__version__ == version("infer-engine")
