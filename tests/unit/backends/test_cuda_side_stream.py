"""Two pieces of a step on two streams of a GPU that is not there: in an order that a real one needs, eager and captured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.cuda_device import FakeDevice
from fakes.cuda_table import table_of
from fakes.order import OrderError
from infer.backends.cuda.cuda_platform import CudaPlatform
from infer.backends.cuda.side_stream import MOST_TOKENS, SideStream
from infer.layers.mlp import MLP
from infer.layers.moe import MoEFacts, SparseMoE
from infer.layers.parameter import named_parameters
from infer.plugins.model import BuildContext
from infer.plugins.platform import Ops, Routing
from infer.quantization.unquantized import UnquantizedMethod

HIDDEN = 16
FACTS = MoEFacts(hidden_size=HIDDEN, intermediate_size=8, num_experts=4, routing=Routing(top_k=2, renormalize=True))


def layer_on(ops: Ops) -> SparseMoE:
    """Random, with a shared expert behind a gate."""
    context = BuildContext(ops=ops, dtype=torch.float32, device=torch.device("cpu"), quant=UnquantizedMethod())
    layer = SparseMoE(context, 0, FACTS, shared=MLP(context, HIDDEN, 24), shared_gate=True)
    generator = torch.Generator().manual_seed(0)
    for slot in named_parameters(layer).values():
        slot.load(torch.randn(slot.shape, generator=generator) * 0.3)
    assert layer.shared is not None
    for part in (layer.shared.gate_up, layer.shared.down, layer):
        part.finalize()
    return layer


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice()


def platform_on(device: FakeDevice) -> CudaPlatform:
    return CudaPlatform(device, table=table_of(device))


def several(layer: SparseMoE, x: Tensor) -> Tensor:
    """Tensors of both streams are freed and their memory is given out again."""
    for _ in range(3):
        x = layer(x)
    return x


def test_both_pieces_are_done_in_order(device: FakeDevice) -> None:
    platform = platform_on(device)
    beside, after = layer_on(platform.ops), layer_on(dataclasses.replace(platform.ops, beside=None))
    with platform.step_context():
        for rows in (1, 3, MOST_TOKENS, MOST_TOKENS + 1):
            x = torch.randn(rows, HIDDEN)
            assert torch.equal(several(beside, x), several(after, x))
    device.check()


def test_a_graph_holds_both(device: FakeDevice) -> None:
    platform = platform_on(device)
    layer = layer_on(platform.ops)
    with platform.step_context():
        x = torch.randn(2, HIDDEN)
        first, graph = platform.record(lambda: several(layer, x))
        expected = first.clone()
        assert graph is not None
        assert torch.equal(graph.replay(), expected)
        x.mul_(2)
        doubled = several(layer, x).clone()
        assert torch.equal(graph.replay(), doubled) and not torch.equal(doubled, expected)
    device.check()


def test_large_steps_stay_on_one_stream(device: FakeDevice) -> None:
    used: list[str] = []
    side = SideStream(device)
    for tokens in (MOST_TOKENS, MOST_TOKENS + 1):

        def note() -> Tensor:
            used.append(device.current.name)
            return torch.zeros(1)

        with device.using(device.main):
            side.beside(tokens, note, note)
    assert used == [used[0], "main", "main", "main"] and used[0] != "main"


class NoFork(SideStream):
    """The other piece does not wait for what it reads."""

    def beside(self, num_tokens: int, work: Callable[[], Tensor], other: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        current = self._device.current_stream()
        with self._device.using(self._stream):
            made = other()
        found = work(), made
        current.follow(self._stream.mark())
        return found


class NoJoin(SideStream):
    """Nobody waits for the other piece."""

    def beside(self, num_tokens: int, work: Callable[[], Tensor], other: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        self._stream.follow(self._device.current_stream().mark())
        with self._device.using(self._stream):
            made = other()
        return work(), made


@pytest.mark.parametrize("wrong", [NoFork, NoJoin])
def test_a_stream_that_does_not_wait_is_found(device: FakeDevice, wrong: type[SideStream]) -> None:
    platform = platform_on(device)
    layer = layer_on(dataclasses.replace(platform.ops, beside=wrong(device).beside))
    with pytest.raises(OrderError), platform.step_context():
        several(layer, platform.ops.rms_norm(torch.randn(2, HIDDEN), torch.ones(HIDDEN), 1e-5))


@pytest.mark.parametrize("fails", ["work", "other"])
def test_an_error_of_a_piece_leaves_the_streams_in_order(device: FakeDevice, fails: str) -> None:
    """What the other piece has queued still reads the step's tensors when they are freed."""
    platform = platform_on(device)
    ops = platform.ops
    assert ops.beside is not None
    weight = torch.randn(8, HIDDEN)

    def product(x: Tensor, broken: bool) -> Tensor:
        made = ops.linear(x, weight, None)
        if broken:
            raise RuntimeError("out of memory")
        return made

    with platform.step_context():
        for _ in range(3):
            x: Any = ops.rms_norm(torch.randn(2, HIDDEN), torch.ones(HIDDEN), 1e-5)
            with pytest.raises(RuntimeError, match="out of memory"):
                ops.beside(2, lambda x=x: product(x, fails == "work"), lambda x=x: product(x, fails == "other"))
            del x
    device.check()
