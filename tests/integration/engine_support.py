"""Random tiny checkpoints with a tokenizer, engines over them, transformers as the oracle, and the trace of steps.
Used by the engine and model tests in this directory; runs in the test's own thread; owns the recorded plans."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from infer import Completion, Engine, EngineConfig, SamplingParams
from infer.backends.cpu import platform as native_platform
from infer.backends.reference import platform as reference_platform
from infer.engine.blocking import BlockingEngine
from infer.engine.request import Request
from infer.engine.step import StepPlan
from infer.models import gemma3, llama, qwen2, qwen3
from infer.plugins.platform import Ops
from infer.testing.tiny_models import random_transformers_model

VOCAB = 320
BOS, EOS = 1, 2
NEAR_TIE = 1e-4
"""Two logits closer than this may swap places between two correct fp32 programs."""

_SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "head_dim": 16,
    "max_position_embeddings": 640,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
}
LLAMA, MISTRAL = (spec.example | _SIZE for spec in llama.infer_models())
QWEN2, QWEN3, GEMMA3 = (module.EXAMPLE | _SIZE for module in (qwen2, qwen3, gemma3))
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma3": GEMMA3 | {"tie_word_embeddings": False},  # tied, a random Gemma repeats its last token for ever
}
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'refuse' %}{{ raise_exception('no such role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CORPUS = (
    "The quick brown fox jumps over the lazy dog. The dog barks at the fox, and the fox answers. "
    "In the beginning there was the word, then there were others; the others were longer than the first."
)


def write_tokenizer(directory: Path) -> None:
    """A byte-level BPE of exactly `VOCAB` ids: any text can be written, any id can be read."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<pad>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 4, trainer)
    assert tokenizer.get_vocab_size() == VOCAB
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "chat_template": CHAT_TEMPLATE}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def write_checkpoint(directory: Path, config: dict[str, Any], seed: int = 0, **save: Any) -> Path:
    """A random model of `config` in transformers' own files, with the tokenizer beside it; `save` goes to
    `save_pretrained` (max_shard_size)."""
    directory.mkdir(parents=True, exist_ok=True)
    random_transformers_model(config, seed).save_pretrained(directory, **save)
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    return directory


def engine_config(path: Path | str, /, **sections: Any) -> EngineConfig:
    """fp32, one thread, 8 slots, 512 blocks of 16: small and exact. Sections are merged over that."""
    chosen: dict[str, Any] = {
        "model": {"ref": str(path), "dtype": "float32"},
        "scheduler": {"max_num_seqs": 8, "max_num_batched_tokens": 64},
        "cache": {"num_blocks": 512},
        "platform": {"threads": 1},
    }
    for name, values in sections.items():
        chosen[name] = chosen.get(name, {}) | values
    if not {"num_blocks"} >= {k for k in chosen["cache"] if k in ("memory", "num_blocks", "memory_fraction")}:
        chosen["cache"].pop("num_blocks")
    return EngineConfig(**chosen)


def serve(path: Path | str, /, **sections: Any) -> BlockingEngine:
    """The engine behind a plain `with`: `generate_many` runs its prompts together."""
    return Engine.blocking(engine_config(path, **sections))


def spoil(monkeypatch: pytest.MonkeyPatch, change: Callable[[Ops], dict[str, Any]]) -> None:
    """Negative controls: engines started from now on compute with these ops replaced, on whatever platform."""
    for module in (native_platform, reference_platform):
        original = module.make_ops

        def spoiled(*args: Any, _original: Any = original) -> Ops:
            table = _original(*args)
            return dataclasses.replace(table, **change(table))

        monkeypatch.setattr(module, "make_ops", spoiled)


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | more))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


# -- the oracle --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Greedy:
    """What transformers' generate() answers, and how far apart its two best logits were at each position."""

    token_ids: list[int]
    gaps: list[float]

    def comparable(self, tolerance: float = NEAR_TIE) -> int:
        """Positions before the first near-tie."""
        return next((i for i, gap in enumerate(self.gaps) if gap < tolerance), len(self.gaps))


class Oracle:
    """A transformers model in fp32, one prompt at a time."""

    def __init__(self, model: Any) -> None:
        self.model = model
        model.generation_config.eos_token_id = None
        model.generation_config.pad_token_id = 0

    @classmethod
    def random(cls, config: dict[str, Any], seed: int = 0) -> Oracle:
        """The same draw as `write_checkpoint`."""
        return cls(random_transformers_model(config, seed))

    def greedy(self, token_ids: Sequence[int], max_tokens: int) -> Greedy:
        with torch.inference_mode():
            out = self.model.generate(
                torch.tensor([list(token_ids)]),
                attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
        best = torch.cat(out.logits).float().topk(2).values
        return Greedy(out.sequences[0, len(token_ids) :].tolist(), (best[:, 0] - best[:, 1]).tolist())

    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[n, vocabulary] after each token."""
        with torch.inference_mode():
            logits: Tensor = self.model(torch.tensor([list(token_ids)])).logits[0]
        return logits.float()

    def log_probs(self, token_ids: Sequence[int]) -> Tensor:
        return self.logits(token_ids).log_softmax(-1)


def same_tokens(got: Sequence[int], expected: Greedy, tolerance: float = NEAR_TIE) -> int:
    """The near-tie rule: equal up to the oracle's first near-tie. Returns how many positions that was."""
    assert len(got) == len(expected.token_ids)
    count = expected.comparable(tolerance)
    assert list(got[:count]) == expected.token_ids[:count]
    return count


def mostly_compared(counts: Sequence[int], total: int) -> None:
    """A comparison that near-ties made empty proves nothing."""
    assert sum(counts) >= 0.8 * total, f"only {sum(counts)} of {total} positions could be compared"


# -- the trace ---------------------------------------------------------------------------------------------------------


@dataclass
class Trace:
    """Every plan the executor was given, in order, and blocks in use per group after each."""

    plans: list[StepPlan] = field(default_factory=list)
    in_use: list[list[int]] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return sum(plan.num_tokens for plan in self.plans)

    def admitted(self, plan: StepPlan) -> set[int]:
        return {admission.slot for admission in plan.admissions}


def record(engine: Engine | BlockingEngine) -> Trace:
    """Watch what the loop submits from now on."""
    parts: Any = parts_of(engine)
    trace, submit = Trace(), parts.executor.submit

    def watched(plan: StepPlan) -> Any:
        trace.plans.append(plan)
        trace.in_use.append([pool.num_in_use for pool in parts.scheduler.kv.pools])
        return submit(plan)

    parts.executor.submit = watched
    return trace


def arrive_together(engine: Engine | BlockingEngine, count: int) -> None:
    """The next `count` requests reach the loop at once, when the last of them comes: how many steps they take together does
    not depend on when their tasks run."""
    mailbox = parts_of(engine).mailbox
    held: list[Request] = []

    def posted(request: Request) -> None:
        held.append(request)
        if len(held) == count:
            del mailbox.post_request  # the class's own again
            for one in held:
                mailbox.post_request(one)

    mailbox.post_request = posted


def parts_of(engine: Engine | BlockingEngine) -> Any:
    inner = engine.engine if isinstance(engine, BlockingEngine) else engine
    assert inner._parts is not None
    return inner._parts


def assert_nothing_held(engine: Engine | BlockingEngine) -> None:
    """No request left, every block free."""
    scheduler = parts_of(engine).scheduler
    assert scheduler.num_unfinished == 0
    assert [pool.num_in_use for pool in scheduler.kv.pools] == [0] * len(scheduler.kv.pools)


def promised(
    engine: Engine | BlockingEngine, logprobs: Sequence[tuple[int, float]], within: float = 1e-4
) -> list[tuple[int, Any]]:
    """Pairs of id and log-probability to compare other runs with, as exactly as the platform's `numerics` promises: on one
    that is not invariant the last bits depend on what else was in a step."""
    inner = engine.engine if isinstance(engine, BlockingEngine) else engine
    if inner.resolved.numerics == "invariant":
        return list(logprobs)
    return [(token_id, pytest.approx(value, abs=within)) for token_id, value in logprobs]


def ids(completions: Sequence[Completion]) -> list[tuple[int, ...]]:
    return [completion.token_ids for completion in completions]
