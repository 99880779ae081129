"""What constrained output costs: 32 requests with a JSON schema against 32 free ones of as many tokens, in interleaved rounds.
Run as a script; prints tokens per second and milliseconds a step of both, their ratio, and what a mask takes. Asserts no time.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field

from infer import Engine, EngineConfig, SamplingParams
from infer.engine.blocking import BlockingEngine
from infer.engine.structured import vocabulary_of
from infer.grammars.llguidance import LLGuidanceBackend
from infer.plugins.grammar import GrammarSource

SCHEMA = """{"type": "array", "minItems": 1000, "items": {"type": "object", "properties": {
  "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
  "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3}},
  "required": ["name", "age", "tags"], "additionalProperties": false}}"""
"""It never ends, so that both write the same number of tokens in batches of the same size."""


@dataclass
class Measured:
    """Runs of all requests at once, their prompts included."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    token_ids: list[list[int]] = field(default_factory=list)
    """Of the last one."""

    def run(self, engine: BlockingEngine, requests: int, params: SamplingParams) -> None:
        """Add one."""
        steps, began = engine.engine.statistics().steps, time.perf_counter()
        done = engine.generate_many([f"List {i} people as JSON." for i in range(requests)], params)
        self.seconds += time.perf_counter() - began
        self.steps += engine.engine.statistics().steps - steps
        self.token_ids = [list(one.token_ids) for one in done]
        self.tokens += sum(map(len, self.token_ids))

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def step_ms(self) -> float:
        return 1e3 * self.seconds / self.steps


def both(engine: BlockingEngine, params: dict[bool, SamplingParams], requests: int) -> dict[bool, Measured]:
    """Free, constrained, constrained, free, added up: a machine that gets slower or faster meanwhile counts for both."""
    found = {True: Measured(), False: Measured()}
    for constrained in (False, True, True, False):
        found[constrained].run(engine, requests, params[constrained])
    return found


def compare(engine: BlockingEngine, temperature: float, options: argparse.Namespace) -> list[list[int]]:
    """Prints a line a round. Returns what was written under the schema."""
    shared = {"max_tokens": options.tokens, "temperature": temperature, "seed": 1, "ignore_eos": True}
    params = {
        False: SamplingParams(**shared),
        True: SamplingParams(structured_output={"json_schema": SCHEMA}, **shared),
    }
    both(engine, params, options.requests)  # warms up
    print(f"\n| temperature {temperature:g} | free tok/s | ms a step | constrained tok/s | ms a step | ratio |")
    print("|---|---:|---:|---:|---:|---:|")
    rounds, written = [], []
    for number in range(1, options.rounds + 1):
        found = both(engine, params, options.requests)
        free, bound = found[False], found[True]
        if free.tokens != bound.tokens:
            raise SystemExit(f"{free.tokens} free tokens and {bound.tokens} constrained ones cannot be compared")
        rounds.append((free.rate, free.step_ms, bound.rate, bound.step_ms, bound.rate / free.rate))
        written = bound.token_ids
        print("| round {} | {:.0f} | {:.2f} | {:.0f} | {:.2f} | {:.3f} |".format(number, *rounds[-1]))
    middle, ratios = [statistics.median(column) for column in zip(*rounds, strict=True)], [one[-1] for one in rounds]
    spread = f"({min(ratios):.3f} to {max(ratios):.3f})"
    print("| median | {:.0f} | {:.2f} | {:.0f} | {:.2f} | {:.3f} {} |".format(*middle, spread))
    return written


def mask_times(engine: BlockingEngine, written: list[list[int]]) -> list[float]:
    """Microseconds of each mask along what was written."""
    inner = engine.engine
    vocabulary = vocabulary_of(inner.tokenizer, inner.model_config)
    grammar = LLGuidanceBackend(vocabulary).compile(GrammarSource(kind="json_schema", text=SCHEMA))
    mask, times = bytearray(vocabulary.mask_bytes), []
    for token_ids in written:
        matcher = grammar.start()
        for token_id in token_ids:
            began = time.perf_counter()
            matcher.fill(mask)
            times.append(1e6 * (time.perf_counter() - began))
            matcher.accept(token_id)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[1.0, 0.0])
    parser.add_argument("--model", help="a model reference; the default model without it")
    parser.add_argument("--keep-forced-tokens", action="store_true", help="structured_output.skip_forced_tokens off")
    options = parser.parse_args()
    config = {} if options.model is None else {"model": options.model}
    asked = EngineConfig(
        scheduler={"max_num_seqs": options.requests},
        structured_output={"skip_forced_tokens": not options.keep_forced_tokens},
        **config,
    )
    with Engine.blocking(asked) as engine:
        written = [compare(engine, temperature, options) for temperature in options.temperatures]
        times = sorted(mask_times(engine, written[0]))
        print(
            f"\nmask: median {statistics.median(times):.1f} us, mean {statistics.mean(times):.1f} us, "
            f"worst {times[-1]:.1f} us over {len(times)} tokens"
        )


if __name__ == "__main__":
    main()
