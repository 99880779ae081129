"""Recorded calls of the native kernels: they give what the calls gave, and what cannot be repeated is noticed."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from infer.backends.cpu.library import _FUNCTIONS
from infer.backends.cpu.platform import NativePlatform, create
from infer.backends.cpu.tape import Tape
from infer.plugins.platform import AttentionMetadata

HEADS, KV_HEADS, SIZE, BLOCK = 6, 2, 16, 4


@pytest.fixture
def platform() -> Iterator[NativePlatform]:
    made = create(2)
    yield made
    made.close()


def decode_work(platform: NativePlatform, dtype: torch.dtype) -> tuple[Callable[[], Tensor], list[Tensor]]:
    """A layer's worth of operations over three rows, and the input they read: hidden states, positions, lengths."""
    ops, rows, width = platform.ops, 3, HEADS * SIZE
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    hidden, ids = draw(rows, width), torch.tensor([3, 0, 17])
    qkv = ops.pack(draw((HEADS + 2 * KV_HEADS) * SIZE, width)) if ops.pack else None
    table, gate_up, down = draw(32, width), draw(64, width), draw(width, 32)
    packed_table, norm, bias = ops.pack(table) if ops.pack else table, draw(width), draw(64)
    keys, values = draw(9, BLOCK, KV_HEADS, SIZE), draw(9, BLOCK, KV_HEADS, SIZE)
    positions, seq_lens = torch.tensor([0, 5, 9]), torch.tensor([1, 6, 10], dtype=torch.int32)
    slots = torch.tensor([4, 13, 33])
    metadata = AttentionMetadata(
        query_starts=torch.arange(rows + 1, dtype=torch.int32),
        seq_lens=seq_lens,
        block_table=torch.tensor([[1, 0, 0], [2, 3, 0], [5, 6, 8]], dtype=torch.int32),
        slot_mapping=slots,
        query_lens_host=[1] * rows,
        seq_lens_host=seq_lens.tolist(),
        num_decode_rows=rows,
    )
    frequencies = torch.linspace(1.0, 0.01, SIZE // 2)

    def work() -> Tensor:
        x, residual = ops.embedding(ids, packed_table), hidden
        assert ops.add_rms_norm is not None and ops.rotary_angles is not None and qkv is not None
        x, residual = ops.add_rms_norm(x, residual, norm, 1e-5)
        heads = ops.linear(x, qkv, None).view(rows, HEADS + 2 * KV_HEADS, SIZE)
        q, k, v = heads.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q, k = ops.rotary(q, k, *ops.rotary_angles(positions, frequencies, 1.0))
        ops.write_kv(k, v, keys, values, slots)
        x = ops.attention(q, keys, values, metadata, SIZE**-0.5, 7, 20.0).flatten(1)
        x, residual = ops.add_rms_norm(x, residual, norm, 1e-5)
        return ops.add_rms_norm(
            ops.linear(ops.gelu_tanh_and_mul(ops.linear(x, gate_up, bias)), down, None), residual, norm, 1e-3
        )[0]

    return work, [hidden, ids, positions, seq_lens]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_replay_reads_its_input_anew(platform: NativePlatform, dtype: torch.dtype) -> None:
    work, (hidden, ids, positions, seq_lens) = decode_work(platform, dtype)
    with platform.step_context():
        expected = work().clone()
        recorded, tape = platform.record(work)
        assert torch.equal(recorded, expected)
        assert tape is not None
        gc.collect()  # what only the recorded calls point at
        junk = [torch.full((4096,), 9.0) for _ in range(50)]
        for step in range(4):
            hidden.normal_(generator=torch.Generator().manual_seed(step))
            ids.copy_(torch.tensor([step, step + 1, 30 - step]))
            positions.add_(1)
            seq_lens[0].add_(1)
            expected = work().clone()
            assert torch.equal(tape.replay(), expected)
        del junk


def test_tapes_share_one_arena(platform: NativePlatform) -> None:
    """Results of one tape lie where the other computes, those that it returns as well: they last until the next replay."""
    with platform.step_context():
        first, second = (decode_work(platform, torch.float32)[0] for _ in range(2))
        expected = [first().clone(), second().clone()]
        (kept, _), one = platform.record(lambda: (first(), second()))
        space = platform._arena.high_water
        two = platform.record(lambda: (second(), first()))[1]
        assert one is not None and two is not None
        assert platform._arena.high_water == space
        for _ in range(2):
            assert all(map(torch.equal, one.replay(), expected))
            assert all(map(torch.equal, two.replay(), expected[::-1]))
        assert torch.equal(kept, one.replay()[0])
    platform.close()
    assert kept.isfinite().all()  # the memory is still there for whoever looks


@pytest.mark.parametrize(
    "foreign",
    [
        lambda x: x + 1,
        lambda x: x.mul_(1.0),
        lambda x: x.t().contiguous(),
        lambda x: x.double().float(),
        lambda x: x.new_zeros(3),
        lambda x: x if x.sum().item() == 0 else x[:],
        lambda x: torch.add(x, 1, out=torch.empty_like(x)),
    ],
    ids=["add", "in place", "copy", "cast", "allocation", "a number taken out", "out"],
)
def test_what_torch_computes_gives_no_tape(platform: NativePlatform, foreign: Callable[[Tensor], Tensor]) -> None:
    x, norm = torch.randn(4, 16), torch.ones(16)
    with platform.step_context():
        result, tape = platform.record(lambda: foreign(platform.ops.rms_norm(x, norm, 1e-5)))
        assert tape is None
        assert result.isfinite().all()


def test_views_are_free(platform: NativePlatform) -> None:
    x, norm = torch.randn(4, 16), torch.ones(16)
    with platform.step_context():
        _, tape = platform.record(lambda: platform.ops.rms_norm(x.view(2, 2, 16)[1].flatten(0).view(2, 16), norm, 1e-5))
        assert tape is not None


def test_a_failing_piece_of_work_leaves_the_operations_as_they_were(platform: NativePlatform) -> None:
    x, norm = torch.randn(4, 16), torch.ones(16)

    def work() -> Tensor:
        platform.ops.rms_norm(x, norm, 1e-5)
        raise ValueError("planted")

    with platform.step_context():
        with pytest.raises(ValueError, match="planted"):
            platform.record(work)
        ordinary = platform.ops.rms_norm(x, norm, 1e-5)
        assert platform.record(lambda: platform.ops.rms_norm(x, norm, 1e-5))[1] is not None
        assert torch.equal(platform.ops.rms_norm(x, norm, 1e-5), ordinary)


def test_a_full_arena_gives_no_tape(platform: NativePlatform, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("infer.backends.cpu.platform.ARENA", 4096)
    x, norm = torch.randn(512, 16), torch.ones(16)
    with platform.step_context():
        result, tape = platform.record(lambda: platform.ops.rms_norm(x, norm, 1e-5))
        assert tape is None
        assert torch.equal(result, platform.ops.rms_norm(x, norm, 1e-5))


def test_every_operation_that_writes_can_be_repeated(platform: NativePlatform) -> None:
    """A kernel that csrc/tape.cpp does not know would fail when a model that uses it is first recorded."""
    setup = ("infer_pool_", "infer_pack_", "infer_tape_")
    library = platform._library
    for name, (result, arguments) in _FUNCTIONS.items():
        if result is None and not name.startswith(setup):
            tape = library.call.infer_tape_create()
            slots = (ctypes.c_uint64 * len(arguments))()
            assert library.call.infer_tape_add(tape, name.encode(), slots, len(arguments)), name
            assert not library.call.infer_tape_add(tape, name.encode(), slots, len(arguments) + 1), name
            library.call.infer_tape_destroy(tape)


def test_an_unknown_call_is_an_error(platform: NativePlatform) -> None:
    with pytest.raises(LookupError, match="infer_pack_blocks"):
        Tape(platform._library, [("infer_pack_blocks", (0, 0, 0, 0, 0))], torch.empty(0))
