"""Registers a name that infer-hello has."""

from __future__ import annotations

from infer.plugins import StorageTargetSpec, hookimpl


@hookimpl
def infer_storage_targets() -> list[StorageTargetSpec]:
    return [StorageTargetSpec(name="hello-log", api=1, factory="twin_hello:make", schemes=("twin",), example={})]
