"""What constrained output costs: 32 requests with a JSON schema against 32 free ones of the same lengths, interleaved.

`python tests/bench/grammar_overhead.py [ROUNDS] [MODEL]`. Prints output tokens per second of both, and what a mask takes.
The constrained ones are asked for a schema that never ends (an array), so that both write the same number of tokens.
"""

from __future__ import annotations

import statistics
import sys
import time

from infer import Engine, EngineConfig, SamplingParams
from infer.engine.blocking import BlockingEngine
from infer.engine.structured import vocabulary_of
from infer.grammars.llguidance import LLGuidanceBackend
from infer.plugins.grammar import GrammarSource

NUM_REQUESTS, NUM_TOKENS = 32, 64
SCHEMA = """{"type": "array", "minItems": 1000, "items": {"type": "object", "properties": {
  "name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
  "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3}},
  "required": ["name", "age", "tags"], "additionalProperties": false}}"""


def rate(engine: BlockingEngine, params: SamplingParams) -> float:
    """Output tokens per second of 32 requests at once."""
    began = time.perf_counter()
    done = engine.generate_many([f"List {i} people as JSON." for i in range(NUM_REQUESTS)], params)
    seconds = time.perf_counter() - began
    return sum(len(one.token_ids) for one in done) / seconds


def mask_times(engine: BlockingEngine) -> list[float]:
    """Microseconds per mask along one random output."""
    inner = engine._engine  # a look inside: the bench measures the backend alone
    vocabulary = vocabulary_of(inner.tokenizer, inner.model_config)
    matcher = LLGuidanceBackend(vocabulary).compile(GrammarSource(kind="json_schema", text=SCHEMA)).start()
    text, times = '[{"name": "Ann", "age": 31, "tags": ["red", "blue"]}, {"name": "Bo", "age": 7, "tags": []},', []
    mask = bytearray(vocabulary.mask_bytes)
    for token_id in vocabulary.encode(text):
        began = time.perf_counter()
        matcher.fill(mask)
        times.append(1e6 * (time.perf_counter() - began))
        matcher.accept(token_id)
    return times


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 4
    config = {"model": sys.argv[2]} if len(sys.argv) > 2 else {}
    shared = {"max_tokens": NUM_TOKENS, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    free = SamplingParams(**shared)
    bound = SamplingParams(structured_output={"json_schema": SCHEMA}, **shared)
    with Engine.blocking(EngineConfig(scheduler={"max_num_seqs": NUM_REQUESTS}, **config)) as engine:
        for params in (free, bound):
            rate(engine, params)  # compiled, warm
        pairs = [(rate(engine, free), rate(engine, bound)) for _ in range(rounds)]
        ratios = [constrained / unconstrained for unconstrained, constrained in pairs]
        for unconstrained, constrained in pairs:
            ratio = constrained / unconstrained
            print(f"free {unconstrained:8.1f} tok/s   constrained {constrained:8.1f} tok/s   ratio {ratio:.3f}")
        print(
            f"median ratio {statistics.median(ratios):.3f} over {rounds} rounds of {NUM_REQUESTS} x {NUM_TOKENS} tokens"
        )
        times = sorted(mask_times(engine))
        print(f"mask: median {statistics.median(times):.1f} us, worst {times[-1]:.1f} us over {len(times)} tokens")


if __name__ == "__main__":
    main()
