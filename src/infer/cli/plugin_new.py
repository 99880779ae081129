"""`infer plugins new KIND NAME`: a complete package of its own, from the kind's template, that passes its kit at once."""

from __future__ import annotations

import importlib.resources
import re
import shutil
from pathlib import Path
from typing import Annotated

import typer

from infer.cli.session import Session
from infer.config.engine import PluginsSection
from infer.errors import ConfigError
from infer.plugins.manager import build_registry
from infer.plugins.registry import BUILTIN, KINDS, Kind

PREFIX = "infer-"
LONGEST = 58
"""With the prefix 64, which is what fields of artifacts may have in front of their dot."""
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_PLACEHOLDER = re.compile("infer-my-name|infer_my_name|my-name|MyName")
USE: dict[Kind, str] = {
    "platform": '`infer run --platform.name my-name "Say hello"` computes on it.',
    "model": 'A checkpoint whose config.json has `"architectures": ["MyNameForCausalLM"]` is run by it.',
    "quant_method": 'A checkpoint whose quantization_config has `"quant_method": "my-name"` is read by it.',
    "kv_connector": "A configuration has `kv_connector: {name: my-name, options: {path: /var/tmp/kv.sqlite}}`.",
    "artifact_field": "`--capture.fields my-name` turns it on; a v2 artifact's contents may then name `infer-my-name.my-name`.",
    "storage_target": "A storage profile whose URL begins with `my-name:` delivers to it.",
    "parser": "A model whose chat template has `<my-name>` gets it; `--api.tool-parser my-name` gives it to any other.",
    "tokenizer": "A model whose directory has `my-name.json` gets it.",
    "model_source": '`infer run my-name:small "Say hello"` runs the model that the name stands for.',
    "grammar": "`--structured-output.backend my-name` names it.",
    "logits_processor": 'A request names it: `"logits_processors": [{"name": "my-name", "params": {"last": 2}}]`.',
    "endpoint": "`infer serve --api.endpoints my-name` serves its routes.",
    "stat_logger": "`infer serve --plugins.stat-loggers my-name --log-level info` shows its line at the end.",
}
"""How an operator turns a plugin of the kind on; also on the page of the kind."""
TEST = '''\
"""The conformance kit of infer over this plugin: one test for each promise of the contract."""

from infer.testing.conformance import PluginTests

import infer_my_name


class TestMyName(PluginTests):
    plugin = infer_my_name
'''
PYPROJECT = """\
[build-system]
requires = ["hatchling>=1.27"]
build-backend = "hatchling.build"

[project]
name = "infer-my-name"
version = "0.1.0"
description = "{title}"
readme = "README.md"
requires-python = ">=3.11"
dependencies = ["infer-engine"]

[project.optional-dependencies]
test = ["pytest", "infer-engine[server,trio]"]

# The one line that makes it a plugin: a module with hooks, in the group "infer".
[project.entry-points.infer]
my-name = "infer_my_name"

[tool.hatch.build.targets.wheel]
only-include = ["infer_my_name.py"]
"""
README = """\
# infer-my-name

{title}

```
pip install -e '.[test]'
pytest                             # the conformance kit
infer plugins check infer-my-name  # the same without pytest, of what is installed
infer plugins show infer-my-name   # what it declares, and what became of it
```

{use}

* `infer_my_name.py` is the plugin. It ends with one function marked `@hookimpl` that returns specs: plain data, a name, where to
  find the factory, and an example that the kit works with. The function only declares: no files, no network, no heavy imports.
* `test_infer_my_name.py` runs the kit. Tests of your own go beside it.
* `api=1` in the spec is the version of the contract that it was written for; infer serves the current version and the one before.

To leave it out without uninstalling it: `plugins.block=["infer-my-name"]` in the configuration.
"""


def new(
    ctx: typer.Context,
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}.")],
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the plugin; its distribution is then infer-NAME.")],
    directory: Annotated[
        Path, typer.Option("--dir", metavar="DIR", help="Where the directory infer-NAME is made; left out: here.")
    ] = Path(),
) -> None:
    """Write the package of a new plugin: a working example of its kind, with pyproject.toml, README and tests."""
    session: Session = ctx.obj
    chosen = _kind(kind)
    plain = plugin_name(name)
    _must_be_free(chosen, plain)
    if not directory.is_dir():
        raise ConfigError(f"--dir {directory}: there is no such directory")
    target = directory / f"{PREFIX}{plain}"
    try:
        target.mkdir()
    except FileExistsError:
        raise ConfigError(f"{target} exists already; choose another name, another --dir, or remove it") from None
    except OSError as error:
        raise ConfigError(f"{target} cannot be made: {error.strerror}") from None
    try:
        for file, text in package(chosen, plain).items():
            (target / file).write_text(text, "utf-8")
    except OSError as error:
        shutil.rmtree(target, ignore_errors=True)
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from None
    session.write(f"{target}: a plugin of the kind {chosen}, {PREFIX}{plain}, which passes its kit as it is. Next:\n")
    shown = target if target.is_absolute() else f"./{target}"  # pip takes a bare word for a name on the index
    for step in (f"pip install -e {shown}", f"pytest {shown}", f"infer plugins check {PREFIX}{plain}"):
        session.write(f"  {step}\n")


def package(kind: Kind, name: str) -> dict[str, str]:
    """File -> text. `name` as `plugin_name` gives it."""
    module = template(kind)
    card = module.split('"""')[1].strip()
    title = card.splitlines()[0]
    files = {
        "pyproject.toml": PYPROJECT.replace("{title}", title.replace('"', "'")),
        "infer_my_name.py": module,
        "test_infer_my_name.py": TEST,
        "README.md": README.replace("{title}", title).replace("{use}", USE[kind]),
    }
    return {_named(file, name): _named(text, name) for file, text in files.items()}


def template(kind: Kind) -> str:
    """The module as it is written for the name "my-name"."""
    return (importlib.resources.files("infer.templates") / f"{kind}.py").read_text("utf-8")


def plugin_name(name: str) -> str:
    """As PEP 503 writes names, without the prefix that every distribution gets. Raises `ConfigError`."""
    plain = re.sub(r"[-_.]+", "-", name).lower().removeprefix(PREFIX)
    if name != name.strip("-_.") or not _NAME.fullmatch(plain) or len(plain) > LONGEST:
        raise ConfigError(
            f"{name!r:.80} is no name of a plugin: up to {LONGEST} letters, digits and single hyphens, a letter first"
        )
    if f"{PREFIX}{plain}" == BUILTIN:
        raise ConfigError(f"{BUILTIN} is the engine itself; choose another name")
    return plain


def _kind(kind: str) -> Kind:
    for known in KINDS:
        if known == kind.replace("-", "_"):
            return known
    raise ConfigError(f"there is no kind of plugin {kind!r:.80}; the kinds are {', '.join(KINDS)}")


def _must_be_free(kind: Kind, name: str) -> None:
    """Two plugins of one kind and name would be a conflict at every start."""
    taken = [spec.name for spec in build_registry(PluginsSection(allow=())).specs(kind)]
    if name in taken:
        raise ConfigError(f"{kind} {name!r} is built in; choose another name than {', '.join(taken)}")


def _named(text: str, name: str) -> str:
    """All placeholders at once, so that no name is taken for one."""
    camel = "".join(part.capitalize() for part in name.split("-"))
    values = {
        "infer-my-name": f"{PREFIX}{name}",
        "infer_my_name": f"{PREFIX}{name}".replace("-", "_"),
        "my-name": name,
        "MyName": camel,
    }
    return _PLACEHOLDER.sub(lambda match: values[match[0]], text)
