"""What reinforcement-learning clients do, against the real model: token ids in and out, with and without a tokenizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT = """
import sys, anyio
from infer import Engine, EngineConfig, SamplingParams
async def main():
    config = EngineConfig(model={"ref": sys.argv[1], "skip_tokenizer": True}, cache={"num_blocks": 64})
    async with Engine(config) as engine:
        done = await engine.generate([1, 2, 3], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    return len(done.token_ids), done.text
print(anyio.run(main), sorted(name for name in sys.modules if name.partition(".")[0] in ("tokenizers", "jinja2")))
"""


@pytest.mark.model
@pytest.mark.row("X-TITO", "no tokenizer is loaded in tokens-only mode (module list check)")
def test_no_tokenizer_is_loaded(smollm2_gguf: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, str(smollm2_gguf)], capture_output=True, text=True, check=False, timeout=200
    )
    assert done.stdout.strip() == "(4, '') []", done.stderr
