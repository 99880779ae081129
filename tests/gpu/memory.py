"""Part: how weights come to the device and what stays on the host, and whether the plan of memory holds for the worst step."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import load_file
from torch import Tensor

from gpu.checkpoints import RandomCheckpoint, dense, sparse
from gpu.checks import Check, Facts, NotHere
from gpu.engines import engine, greedy, random_prompts
from gpu.place import Place
from infer.backends.reference.platform import OPS
from infer.config.engine import PluginsSection
from infer.layers.parameter import Layer, named_layers
from infer.plugins import build_registry
from infer.plugins.model import CausalLM
from infer.testing.tiny_models import DictCheckpoint, build_model
from infer.weights.facts import read_model_config
from infer.weights.loader import load_weights
from infer.weights.opening import open_checkpoint

SLACK = 64 << 20
"""Bytes of host memory that Python, torch and the driver take of their own accord."""
LOST_SHARE = 0.05


def checks(place: Place) -> Iterator[Check]:
    yield Check("dense weights come file to device", lambda: direct(place, dense(place), 2))
    yield Check("experts come layer by layer", lambda: direct(place, sparse(place), 1))
    yield Check("no host copy of the experts stays", lambda: host_free(place, sparse(place)))
    yield Check("dense weights equal an ordinary load", lambda: ordinary(place, dense(place)))
    yield Check("8-bit cache: twice the tokens in the same bytes", lambda: eight_bit_cache(place, dense(place)))
    yield Check("another process does not count", lambda: own_use(place))
    yield Check("the plan holds for the worst step", lambda: plan(place, dense(place)))


def load(place: Place, checkpoint: RandomCheckpoint, tensors: dict[str, Tensor] | None = None) -> CausalLM:
    """The model on the device, from its files, or from tensors that are all on the host."""
    registry = build_registry(PluginsSection(allow=()))
    specs = registry.specs("model")
    config = read_model_config(checkpoint.path, "random", specs)
    [spec] = [s for s in specs if config.architecture in s.architectures]
    quant = registry.create("quant_method", "unquantized", None)
    device = str(place.device)
    model = build_model(spec, config, ops=OPS, quant=quant, dtype=place.dtype, device=device)
    opened = open_checkpoint(config, specs) if tensors is None else DictCheckpoint(tensors)
    try:
        with torch.no_grad():
            load_weights(model, opened)
    finally:
        opened.close()
    place.synchronize()
    return model


class HostMemory:
    """Anonymous memory of this process (pages of files are the kernel's to drop), watched by a thread."""

    def __init__(self) -> None:
        self.highest = self.before = anonymous()
        self._over = threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HostMemory:
        self._watcher.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._watcher.join()

    @property
    def rise(self) -> int:
        return self.highest - self.before

    def _watch(self) -> None:
        while not self._over.is_set():
            self.highest = max(self.highest, anonymous())
            time.sleep(0.002)


def anonymous() -> int:
    """All resident memory where the system does not tell the two apart."""
    lines = [line.split() for line in Path("/proc/self/status").read_text("utf-8").splitlines()]
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[-1:] == ["kB"]}
    if "RssAnon" in sizes:
        return sizes["RssAnon"] + sizes.get("RssShmem", 0)
    if "VmRSS" in sizes:
        return sizes["VmRSS"]
    raise NotHere("this system does not say how much memory a process holds")


def watched(work: Callable[[], Any]) -> tuple[Any, int]:
    """-> its result and the rise of host memory at its highest."""
    with HostMemory() as memory:
        made = work()
    return made, memory.rise


def direct(place: Place, checkpoint: RandomCheckpoint, layers: int) -> Facts:
    """At most so many layers are on the host at a time. (In a dry run the model itself is, too.)"""
    load(place, checkpoint)  # the driver's and torch's own first time
    model, rise = watched(lambda: load(place, checkpoint))
    allowed = layers * checkpoint.layer_bytes + SLACK
    if place.dry_run:
        allowed += sum(tensor.nbytes for tensor in all_tensors(model))
    assert rise <= allowed, f"host memory rose by {rise >> 20} MiB; {layers} layers are {allowed >> 20}"
    return {"host_peak_bytes": rise, "layer_bytes": checkpoint.layer_bytes}


def host_free(place: Place, checkpoint: RandomCheckpoint) -> Facts:
    """Steady memory after the load."""
    before = anonymous()
    model = load(place, checkpoint)
    kept = anonymous() - before
    allowed = LOST_SHARE * checkpoint.expert_bytes + SLACK
    if place.dry_run:
        allowed += sum(tensor.nbytes for tensor in all_tensors(model))
    assert kept <= allowed, f"{kept >> 20} MiB stayed on the host; the experts are {checkpoint.expert_bytes >> 20}"
    return {"host_bytes_kept": kept, "expert_bytes": checkpoint.expert_bytes}


def all_tensors(model: CausalLM) -> list[Tensor]:
    return [tensor for _, layer in named_layers(cast(Layer, model)) for tensor in layer.tensors()]


def ordinary(place: Place, checkpoint: RandomCheckpoint) -> Facts:
    """A load with everything on the host first ends with the same bits, so its tokens are the same."""
    first = all_tensors(load(place, checkpoint))
    second = all_tensors(load(place, checkpoint, load_file(checkpoint.path / "model.safetensors")))
    assert len(first) == len(second)
    different = sum(not torch.equal(one, other) for one, other in zip(first, second, strict=True))
    assert not different, f"{different} of {len(first)} weights differ"
    return {"weights": len(first)}


OTHER = """
import sys
if sys.argv[1] == "cuda":
    import torch
    kept = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
else:
    kept = bytearray(b"x") * (1 << 28)
print("there", flush=True)
sys.stdin.read()
"""


def own_use(place: Place) -> Facts:
    """What the platform says is in use does not rise while another process takes memory, a gigabyte on a GPU."""
    registry = build_registry(PluginsSection(allow=()))
    platform = registry.create("platform", place.platform)
    try:
        before = platform.memory_in_use(), platform.limits().available_memory
        command = [sys.executable, "-c", OTHER, place.device.type]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None and other.stdout.readline() == "there\n"
            rise, taken = platform.memory_in_use() - before[0], before[1] - platform.limits().available_memory
            other.communicate("")
    finally:
        platform.close()
    assert rise <= SLACK, f"memory in use rose by {rise >> 20} MiB"
    return {"rise_bytes": rise, "free_memory_fell_by": taken}


def eight_bit_cache(place: Place, checkpoint: RandomCheckpoint) -> Facts:
    """Blocks in the same memory, and an answer from such a cache."""
    memory = place.sizes.max_num_seqs * 16 * 16 * checkpoint.kv_bytes
    blocks = []
    for dtype in ("auto", "fp8_e4m3"):
        cache = {"num_blocks": None, "memory": memory, "dtype": dtype}
        with engine(place, checkpoint, cache=cache) as opened:
            blocks.append(opened.engine.resolved.cache.groups[0].num_blocks)
            [done] = opened.generate_many(random_prompts(checkpoint, 1, 20), greedy(8))
            assert len(done.choices[0].token_ids) == 8, done
    assert blocks[1] >= 1.9 * blocks[0], f"{blocks[0]} blocks of the compute dtype and {blocks[1]} of 8 bits"
    return {"blocks": blocks[0], "blocks_of_8_bits": blocks[1]}


def plan(place: Place, checkpoint: RandomCheckpoint) -> Facts:
    """The most that torch held at a time, with graphs and log-probabilities of prompts, is what was planned or up to 5 % less."""
    sizes = place.sizes
    if not place.dry_run:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    scheduler = {"max_num_seqs": sizes.max_num_seqs, "max_num_batched_tokens": max(64, sizes.prompt_len * 10)}
    prompts = random_prompts(checkpoint, 2 * sizes.max_num_seqs, sizes.prompt_len)
    params = greedy(sizes.max_tokens, temperature=0.8, top_p=0.9, seed=1, prompt_logprobs=1)
    with engine(place, checkpoint, scheduler=scheduler) as opened:
        planned = opened.engine.resolved.memory.total
        opened.generate_many(prompts, params)
        if place.dry_run:
            return {"planned_bytes": planned}
        place.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    assert peak <= planned, f"{peak >> 20} MiB were used, {planned >> 20} planned"
    assert planned - peak <= max(LOST_SHARE * peak, 32 << 20), f"{planned >> 20} MiB planned, {peak >> 20} used"
    return {"planned_bytes": planned, "peak_bytes": peak}
