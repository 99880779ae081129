"""vLLM on CPU: `vllm_driver.py DIRECTORY`, in vLLM's interpreter and with `catalog.vllm_environment`."""

from __future__ import annotations

import sys

from timing import Session, measure


def main(model: str) -> None:
    session = Session()
    from vllm import LLM, SamplingParams  # here: it starts processes that import this file again
    from vllm.inputs import TokensPrompt

    engine = LLM(model=model, dtype="bfloat16", max_model_len=2048, max_num_seqs=64, disable_log_stats=True)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        asked = [TokensPrompt(prompt_token_ids=prompt) for prompt in prompts]
        done = engine.generate(asked, params, use_tqdm=False)
        assert all(len(each.outputs[0].token_ids) == tokens for each in done)

    measure(session, generate)
    session.finish()


if __name__ == "__main__":
    main(sys.argv[1])
