"""What a model looks like on disk and where files may be written. Used by model sources on a worker thread.

Owns nothing; opens no weight file.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from infer.errors import ModelError, UnsupportedModelError

WEIGHTS = "*.safetensors"
GGUF = "*.gguf"
MODEL_FILES = (WEIGHTS, "*.json", "*.jinja", "*.model", "*.txt", "tekken.json")
"""What a checkpoint directory needs: weights, configuration, tokenizer, chat template."""
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def select_files(names: Iterable[str], reference: str) -> list[str]:
    """Of the relative file names a model offers, those to fetch: a safetensors checkpoint, else the one .gguf."""
    names = sorted(names)
    top = [name for name in names if "/" not in name]
    if any(fnmatch.fnmatch(name, WEIGHTS) for name in top):
        return [name for name in top if any(fnmatch.fnmatch(name, pattern) for pattern in MODEL_FILES)]
    ggufs = [name for name in names if fnmatch.fnmatch(name, GGUF)]
    if len(ggufs) == 1:
        return ggufs
    if ggufs:
        raise ModelError(
            f"{reference} holds {len(ggufs)} .gguf files ({_shorten(ggufs)}): name one of them, for example by URL"
        )
    pickles = [name for name in top if any(fnmatch.fnmatch(name, pattern) for pattern in PICKLES)]
    if pickles:
        raise UnsupportedModelError(
            f"{reference} has pickle weights only ({_shorten(pickles)}), which can run code when read: "
            "convert them to safetensors, or take a repository that has them"
        )
    raise ModelError(f"{reference} holds no model: neither *.safetensors nor *.gguf among {_shorten(names)}")


def find_model(root: Path, reference: str) -> Path:
    """The checkpoint directory or .gguf file at `root` or, where `root` holds one model only, below it."""
    if root.is_file():
        if root.suffix.lower() != ".gguf":
            raise ModelError(
                f"{reference}: {root.name} is not a .gguf file; name a directory with config.json or a .gguf"
            )
        return root
    if (root / "config.json").is_file():
        return root
    found = sorted(path for path in root.rglob(GGUF) if path.is_file())
    found += sorted(path.parent for path in root.rglob("config.json") if any(path.parent.glob(WEIGHTS)))
    if len(found) == 1:
        return found[0]
    if not found:
        names = _shorten(sorted(path.name for path in root.iterdir()))
        raise ModelError(
            f"{reference} holds no model: neither config.json with *.safetensors nor a .gguf (it has {names})"
        )
    listed = _shorten([str(path.relative_to(root)) for path in found])
    raise ModelError(f"{reference} holds {len(found)} models ({listed}): name one of them by its path")


def safe_target(root: Path, name: str, reference: str) -> Path:
    """`root / name` for a name from an archive or a listing. Raises `ModelError` when it would leave `root`."""
    parts = PurePosixPath(name).parts
    if not parts or name.startswith("/") or ".." in parts or "\\" in name or "\0" in name or ":" in parts[0]:
        raise ModelError(f"{reference} holds a file named {name!r}, which points outside its directory: refused")
    return root.joinpath(*parts)


def fingerprint(path: Path) -> str:
    """Identity of local files without opening one: a plan that does not fit is refused before any weight is touched.

    Writing into a file moves its change time, which no program can set back.
    """
    digest = hashlib.sha256()
    files = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.is_file() and _is_content(p.name))
    for file in files:
        facts = file.stat()
        times = f"{facts.st_mtime_ns}\0{facts.st_ctime_ns}"
        digest.update(f"{file.name}\0{facts.st_size}\0{facts.st_dev}:{facts.st_ino}\0{times}\0".encode())
    return f"local:{digest.hexdigest()}"


def _is_content(name: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in MODEL_FILES)


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return (", ".join(names[:8]) or "nothing") + more
