"""The sampler against the transformers chain, chi-square, its own promises, and rows that must fail alone."""

from __future__ import annotations

import math
import random
import weakref

import msgspec
import pytest
import torch
from torch import Tensor

from infer.engine.sampling import sampler, temperature
from infer.engine.sampling.sampler import NO_TOKEN, ORDER, chunk_rows, process, sample, workspace_bytes
from infer.engine.step import SamplingSpec
from infer.types import SamplingParams
from unit.engine.sampling.settings import oracle, processed, random_case, row_of

VOCAB = 83
INF = math.inf


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.row("SAMPLE-CORE", "for 500 random settings processed logits equal a transformers chain within 1e-6")
def test_processed_logits_equal_the_transformers_chain() -> None:
    rng = random.Random(0)
    kept_some = 0
    for case in range(500):
        spec, ids, prompt_len = random_case(rng, VOCAB)
        logits = randn(VOCAB, seed=case)
        ours, theirs = processed(spec, ids, prompt_len, logits), oracle(spec, ids, prompt_len, logits)
        if bool((theirs == -INF).all()):
            continue
        kept_some += 1
        assert (ours == -INF).tolist() == (theirs == -INF).tolist(), spec
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    assert kept_some > 450


def test_rows_processed_together_equal_rows_processed_alone() -> None:
    rng = random.Random(1)
    cases = [random_case(rng, VOCAB) for _ in range(40)]
    logits = randn(40, VOCAB)
    together = logits.clone()
    process(together, [row_of(*case, VOCAB) for case in cases])
    for i, case in enumerate(cases):
        assert torch.equal(together[i], processed(*case, logits[i]))


def test_the_order_is_the_documented_one() -> None:
    named = [transform.__module__.rpartition(".")[2] for _, transform in ORDER]
    said = SamplingParams.__doc__ or ""
    order = ["structured_output", "allowed_token", "bad_words", "logit_bias", "min_tokens", "logits_processors"]
    order += ["repetition", "frequency", "temperature", "top_k", "top_p", "min_p"]
    said = said[said.index("in this order") :]
    assert [said.index(name) for name in order] == sorted(said.index(name) for name in order)
    elsewhere = {"frequency": "output_penalties", "structured_output": "grammar_mask"}
    modules = [elsewhere.get(name, name) for name in order]
    assert [name[: len(want)] for name, want in zip(named, modules, strict=True)] == modules


@pytest.mark.row("SAMPLE-CORE", "sampled frequencies pass a chi-square test")
@pytest.mark.parametrize(
    "spec",
    [
        SamplingSpec(seed=3),
        SamplingSpec(seed=3, temperature=1.7),
        SamplingSpec(seed=3, top_k=9),
        SamplingSpec(seed=3, top_p=0.8),
        SamplingSpec(seed=3, min_p=0.05, presence_penalty=1.0),
    ],
)
def test_frequencies_pass_chi_square(spec: SamplingSpec) -> None:
    logits = randn(VOCAB, seed=5) / 3
    ids, draws = [4, 9, 9, 30], 20_000
    expected = torch.softmax(oracle(spec, ids, 2, logits).double(), dim=-1) * draws
    rows = [row_of(spec, ids, 2, VOCAB) for _ in range(draws)]
    for position, row in enumerate(rows):
        row.output_position = position
    counts = torch.bincount(torch.tensor(sample(logits.expand(draws, -1), rows).token_ids), minlength=VOCAB).double()
    assert int(counts[expected == 0].sum()) == 0
    common = expected >= 5
    statistic = float(((counts - expected)[common] ** 2 / expected[common]).sum())
    freedom = int(common.sum()) - 1
    assert statistic < freedom + 4 * math.sqrt(2 * freedom)


@pytest.mark.row("SAMPLE-CORE", "a seed repeats across batch composition")
@pytest.mark.parametrize("batch", [1, 2, 3, 7, 16])
def test_seeded_rows_repeat_whatever_their_neighbours(batch: int) -> None:
    """Case 52: half the rows seeded, mixed batch sizes, 20 repeats."""
    rng = random.Random(batch)
    logits = randn(batch, VOCAB, seed=batch)
    seeded = [random_case(rng, VOCAB) for _ in range((batch + 1) // 2)]
    alone = [sample(logits[i : i + 1], [row_of(*case, VOCAB)]).token_ids[0] for i, case in enumerate(seeded)]
    for _ in range(20):
        others = [random_case(rng, VOCAB) for _ in range(batch - len(seeded))]
        order = rng.sample(range(batch), batch)
        rows = [row_of(*case, VOCAB) for case in seeded + others]
        drawn = sample(logits[order], [rows[i] for i in order]).token_ids
        assert [drawn[order.index(i)] for i in range(len(seeded))] == alone


@pytest.mark.row("SAMPLE-CORE", "a seed repeats across restart")
def test_a_seed_draws_the_same_tokens_in_every_process() -> None:
    """Written down once, in another process."""
    logits = torch.sin(torch.arange(1000) * 0.7) * 2
    rows = [row_of(SamplingSpec(seed=2024), [0], 1, 1000) for _ in range(8)]
    for position, row in enumerate(rows):
        row.output_position = position
    assert sample(logits.expand(8, -1), rows).token_ids == PINNED


PINNED = [604, 344, 576, 666, 19, 524, 999, 291]


def test_choices_of_neighbouring_seeds_differ_and_positions_do_too() -> None:
    logits = torch.zeros(40, 5000)
    by_seed = [row_of(SamplingSpec(seed=i), [0], 1, 5000) for i in range(40)]
    by_position = [row_of(SamplingSpec(seed=0), [0], 1, 5000) for _ in range(40)]
    for position, row in enumerate(by_position):
        row.output_position = position
    assert len(set(sample(logits, by_seed).token_ids)) > 35
    assert len(set(sample(logits, by_position).token_ids)) > 35


@pytest.mark.parametrize("t", [0.0, 1e-45, 1e-9])
def test_temperature_zero_is_argmax_of_the_lowest_id(t: float) -> None:
    logits = torch.zeros(2, 5000)
    logits[0, [4999, 17, 300]] = 2.5
    row = row_of(SamplingSpec(seed=1, temperature=t, top_k=3, top_p=0.1), [0], 1, 5000)
    assert sample(logits, [row, row]).token_ids == [17, 0]
    assert sample(logits, None).token_ids == [17, 0]


def test_sampling_leaves_the_logits_as_they_were() -> None:
    rng = random.Random(2)
    logits = randn(12, VOCAB)
    before = logits.clone()
    sample(logits, [row_of(*random_case(rng, VOCAB), VOCAB) for _ in range(12)])
    assert torch.equal(logits, before)


@pytest.mark.row("X-POISON", "a row whose logits or settings cannot be sampled fails alone, neighbours unaffected")
def test_rows_that_cannot_be_sampled_fail_alone() -> None:
    logits = randn(6, VOCAB)
    spec = SamplingSpec(seed=8, temperature=0.9, logprobs=2)
    rows = [row_of(spec, [1, 2], 2, VOCAB) for _ in range(6)]
    expected = sample(logits, rows)
    logits[1, 5] = float("nan")
    logits[2] = -INF
    logits[3, 7] = INF
    rows[4] = row_of(SamplingSpec(seed=8, allowed_token_ids=(3,), bad_words=((3,),), logprobs=1), [1], 1, VOCAB)
    out = sample(logits, rows)
    assert out.errors == {
        1: "logits hold NaN",
        2: "all logits are -inf",
        3: "logits hold +inf",
        4: "no token is left to sample after the grammar, allowed_token_ids, bad_words and min_tokens",
    }
    assert out.token_ids == [expected.token_ids[0], *[NO_TOKEN] * 4, expected.token_ids[5]]
    assert out.logprobs == {0: expected.logprobs[0], 5: expected.logprobs[5]}


@pytest.mark.row("X-POISON", "a sampler error ends the row that caused it")
def test_a_transform_that_raises_fails_only_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(logits: Tensor, index: list[int], rows: list[sampler.SamplingRow]) -> None:
        if any(rows[i].spec.temperature == 0.5 for i in index):
            raise ValueError("boom")
        temperature.apply(logits, index, rows)

    order = tuple((f, explode if t is temperature.apply else t) for f, t in ORDER)
    monkeypatch.setattr(sampler, "ORDER", order)
    logits = randn(3, VOCAB)
    rows = [row_of(SamplingSpec(seed=i, temperature=t), [1], 1, VOCAB) for i, t in enumerate([0.8, 0.5, 0.8])]
    out = sample(logits, rows)
    assert out.errors == {1: "sampling failed: ValueError: boom"}
    assert out.token_ids[0] == sample(logits[:1], rows[:1]).token_ids[0]
    assert out.token_ids[2] == sample(logits[2:], rows[2:]).token_ids[0]


@pytest.mark.row("SAMPLE-LOGIT-FILTERS", "a bias of 100 always yields that token")
def test_a_bias_of_100_always_wins() -> None:
    logits = randn(500, VOCAB, seed=9)
    rows = [row_of(SamplingSpec(seed=i, logit_bias=((i % VOCAB, 100.0),)), [0], 1, VOCAB) for i in range(500)]
    assert sample(logits, rows).token_ids == [i % VOCAB for i in range(500)]


@pytest.mark.row("SAMPLE-LOGIT-FILTERS", "an allow-list is never left in 1,000 draws")
def test_an_allow_list_is_never_left() -> None:
    spec = SamplingSpec(seed=1, temperature=3.0, allowed_token_ids=(2, 40, 82), logit_bias=((5, 100.0),))
    rows = [row_of(spec, [0], 1, VOCAB) for _ in range(1000)]
    for position, row in enumerate(rows):
        row.output_position = position
    assert set(sample(randn(1000, VOCAB), rows).token_ids) == {2, 40, 82}


@pytest.mark.row("SAMPLE-LOGIT-FILTERS", "a multi-token bad word never appears though its pieces may")
def test_a_bad_word_never_appears_but_its_pieces_do() -> None:
    words = ((1, 2), (2, 2, 0), (3,), (0, 1, 0, 1))
    row = row_of(SamplingSpec(seed=7, bad_words=words), [1], 1, 5)
    ids = [1]
    for position in range(3000):
        row.output_position = position
        token_id = sample(torch.zeros(1, 5), [row]).token_ids[0]
        row.accept(token_id)
        ids.append(token_id)
    for word in words:
        assert all(tuple(ids[i : i + len(word)]) != word for i in range(len(ids)))
    assert set(ids) == {0, 1, 2, 4} and any(ids[i : i + 2] == [2, 2] for i in range(len(ids)))


class PeakBytes(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[name-defined, misc]
    """Peak bytes of tensors that operations make, inner ones included."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg]
        out = func(*args, **(kwargs or {}))  # type: ignore[operator]
        for item in torch.utils._pytree.tree_leaves(out):
            if isinstance(item, Tensor) and item.untyped_storage()._cdata not in self.known:
                storage = item.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.forget, storage._cdata, storage.nbytes())
        return out

    def forget(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


@pytest.mark.parametrize("kept_set", [False, True])
@pytest.mark.parametrize("rows", [3, 200])
def test_memory_beside_the_logits_stays_within_the_stated_bytes(rows: int, kept_set: bool) -> None:
    vocab = 20_000
    logits = randn(rows, vocab) / 20  # flat: the widest case of top-p
    spec = SamplingSpec(
        seed=0, temperature=0.9, top_k=19_000, top_p=0.95, min_p=1e-4, repetition_penalty=1.1, logprobs=20,
        return_kept_set=kept_set,
    )  # fmt: skip
    sampling = [row_of(spec, [1, 2, 3], 1, vocab) for _ in range(rows)]
    sorted_copy = 4 * vocab * min(rows, chunk_rows(vocab))  # NumPy's, which the mode does not see
    peak = PeakBytes()
    with peak:
        sample(logits, sampling)
    assert peak.peak + sorted_copy <= workspace_bytes(vocab)


@pytest.mark.row("X-SCORE-IDS", "memory is bounded by rows x candidates")
@pytest.mark.row("SAMPLE-LOGPROB-TOKEN-IDS", "no full-vocabulary payload is sent")
def test_scoring_takes_memory_for_the_candidates_not_for_the_vocabulary() -> None:
    rows, vocab, candidates = 200, 20_000, tuple(range(0, 20_000, 200))
    logits = randn(rows, vocab)
    peaks, result = [], None
    for ids in ((), candidates):
        spec = SamplingSpec(seed=0, temperature=0.0, logprobs=0, logprob_token_ids=ids)
        sampling = [row_of(spec, [1], 1, vocab) for _ in range(rows)]
        with PeakBytes() as peak:
            result = sample(logits, sampling)
        peaks.append(peak.peak)
    assert result is not None
    assert all(len(entry.candidates) == len(candidates) and not entry.top for entry in result.logprobs.values())
    assert peaks[1] - peaks[0] <= 32 * chunk_rows(vocab) * len(candidates)
    assert len(msgspec.msgpack.encode(result.logprobs)) < 10 * rows * len(candidates) + 100 * rows
