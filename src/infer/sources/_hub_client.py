"""Fetches one commit's weights, configuration and tokenizer through huggingface_hub; no code from the repository.

Runs on a worker thread. Apart from `hub`, which declares it, because huggingface_hub takes a quarter second to import.
"""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, errors, snapshot_download
from huggingface_hub.utils.tqdm import tqdm

from infer.errors import InferError, ModelError
from infer.plugins.model_cache import CacheEntry, Filled, fetch, list_entries, watch_size
from infer.plugins.model_files import find_model, select_files
from infer.plugins.model_source import Progress, ProgressCallback, ResolvedModel

SCHEME = "hf:"
_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_-])?"
_REFERENCE = re.compile(rf"(?:hf:)?(?P<repo>{_NAME}/{_NAME})(?:@(?P<revision>[A-Za-z0-9][A-Za-z0-9._/-]*))?")


class HubSource:
    """Answers for `hf:org/name[@revision]` and for a bare `org/name`. Once in the cache, a revision is not asked for again."""

    def __init__(self, cache_dir: Path, offline: bool, token: str | None, endpoint: str | None = None) -> None:
        """`endpoint` None leaves the server to huggingface_hub (HF_ENDPOINT, else the Hub)."""
        self._cache_dir = cache_dir
        self._offline = offline
        self._token = token
        self._endpoint = endpoint

    def matches(self, reference: str) -> bool:
        if reference.startswith(SCHEME):
            return not reference.startswith("hf://")
        return _REFERENCE.fullmatch(reference) is not None and not Path(reference).exists()

    def resolve(self, reference: str, progress: ProgressCallback) -> ResolvedModel:
        match = _REFERENCE.fullmatch(reference)
        if match is None:
            raise ModelError(f"{reference!r} is not of the form hf:org/name or hf:org/name@revision")
        repo, revision = match["repo"], match["revision"] or "main"
        entry = self._cached(repo, revision)
        if entry is None:
            if self._offline:
                raise ModelError(
                    f"{reference} is not in the cache {self._cache_dir} and offline mode is on: "
                    f"unset INFER_OFFLINE and HF_HUB_OFFLINE, or run `infer pull {reference}` where there is a network"
                )
            entry = fetch(
                self._cache_dir,
                f"{SCHEME}{repo}@{revision}",
                lambda content: self._fill(content, repo, revision, reference, progress),
                progress,
                keep_partial=True,
            )
        return entry.resolved(reference)

    def _cached(self, repo: str, revision: str) -> CacheEntry | None:
        exact = f"{SCHEME}{repo}@{revision}"
        return next((e for e in list_entries(self._cache_dir) if exact in (e.key, e.reference)), None)

    def _fill(self, content: Path, repo: str, revision: str, reference: str, progress: ProgressCallback) -> Filled:
        progress(Progress("download", 0, None, "B", reference))
        try:
            api = HfApi(endpoint=self._endpoint, token=self._token)
            info = api.model_info(repo, revision=revision, files_metadata=True, timeout=30)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
            files = select_files(sizes, reference)
            total = sum(sizes[name] for name in files)
            commit, stopped = str(info.sha), threading.Event()
            with watch_size((content,), lambda: total, f"{repo}@{commit[:12]}", progress, stopped.set):
                snapshot_download(
                    repo,
                    revision=commit,
                    local_dir=content,
                    allow_patterns=[_literal(name) for name in files],
                    token=self._token,
                    endpoint=self._endpoint,
                    tqdm_class=_silent_bar(stopped),
                )
        except (InferError, InterruptedError):
            raise
        except Exception as error:
            raise _explained(error, reference, repo, revision) from error
        missing = [name for name in files if not (content / name).is_file()]
        if missing:
            raise ModelError(f"{reference}: the server did not send {missing[0]}; pull the model again")
        shutil.rmtree(content / ".cache", ignore_errors=True)  # huggingface_hub's notes for resuming
        progress(Progress("download", total, total, "B", f"{repo}@{commit}"))
        return Filled(
            reference=f"{SCHEME}{repo}@{commit}", identity=f"hf:{repo}@{commit}", model=find_model(content, reference)
        )


def _silent_bar(stopped: threading.Event) -> type[tqdm]:
    """huggingface_hub draws its own bars on stderr; ours come from `Progress`. The bar is also where it can be stopped."""

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **{**kwargs, "disable": True})  # type: ignore[no-untyped-call]

        def update(self, n: float | None = 1) -> bool:
            if stopped.is_set():
                raise InterruptedError("the download was stopped")
            return bool(super().update(n))

    return SilentBar


def _literal(name: str) -> str:
    """A file name as a pattern that matches nothing else."""
    return re.sub(r"([\[*?])", r"[\1]", name)


def _explained(error: Exception, reference: str, repo: str, revision: str) -> ModelError:
    """What went wrong and what to do, in one line."""
    if isinstance(error, errors.GatedRepoError):
        why = "is gated: accept its terms on its page and set HF_TOKEN to a token of that account"
    elif isinstance(error, errors.RevisionNotFoundError | errors.RevisionResolutionError):
        why = f"has no revision {revision!r}: check the branch, tag or commit"
    elif isinstance(error, errors.RepositoryNotFoundError):
        why = "does not exist or is private: check the spelling, or set HF_TOKEN to a token that may read it"
    elif isinstance(error, errors.DisabledRepoError):
        why = "was disabled by the server"
    elif isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", None)
        why = f"could not be fetched (HTTP {status}): " + (
            "set HF_TOKEN to a valid token" if status in (401, 403) else "try again later; what has arrived is kept"
        )
    else:
        first_line = (str(error) or type(error).__name__).splitlines()[0]
        why = f"could not be fetched ({type(error).__name__}: {first_line}): check the network, HF_ENDPOINT and disk space"
    return ModelError(f"{reference} {why}" if reference.endswith(repo) else f"{reference} ({repo}) {why}")


def create(cache_dir: Path, offline: bool, token: str | None) -> HubSource:
    return HubSource(cache_dir, offline, token)
