"""Where the built-in leaves live: one package per kind, each module in it a plugin.

Called while a registry is built; finds modules by walking the packages, so that adding a leaf is adding one file.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from infer.plugins.registry import Kind

PACKAGES: dict[Kind, str] = {
    "platform": "infer.backends",
    "model": "infer.models",
    "quant_method": "infer.quantization",
    "kv_connector": "infer.connectors",
    "artifact_field": "infer.artifacts.fields",
    "storage_target": "infer.storage",
    "parser": "infer.parsers",
    "tokenizer": "infer.tokenizers",
    "model_source": "infer.sources",
    "grammar": "infer.grammars",
    "logits_processor": "infer.logits_processors",
    "endpoint": "infer.endpoints",
    "stat_logger": "infer.stat_loggers",
}


def builtin_modules(kind: Kind) -> list[str]:
    """Names of the modules that may declare specs of this kind, sorted; nothing but the package itself is imported.

    A backend is a package of many kernel files: only its `platform` module is looked at. Modules that begin with an
    underscore are support files.
    """
    package = PACKAGES[kind]
    if not _exists(package):
        return []
    names = [f"{package}.{info.name}" for info in pkgutil.iter_modules(importlib.import_module(package).__path__)]
    names = [name for name in names if not name.rpartition(".")[2].startswith("_")]
    if kind == "platform":
        names = [f"{name}.platform" for name in names if _exists(f"{name}.platform")]
    return sorted(names)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
