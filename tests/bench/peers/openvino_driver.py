"""OpenVINO GenAI with continuous batching: `openvino_driver.py EXPORTED PRECISION THREADS`, in OpenVINO's interpreter."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import openvino
import openvino_genai
from timing import Session, measure


def main(model: str, precision: str, threads: str) -> None:
    session = Session()
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": int(threads), "PERFORMANCE_HINT": "LATENCY"}
    if precision:
        properties["INFERENCE_PRECISION_HINT"] = precision
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.cache_size = 2  # GB
    scheduler.max_num_seqs = 64
    scheduler.max_num_batched_tokens = 2048
    scheduler.dynamic_split_fuse = True
    scheduler.enable_prefix_caching = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU", properties)

    def generate(prompts: list[list[int]], tokens: int) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos, config.do_sample, config.eos_token_id = True, False, -1
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        done = pipeline.generate(ids, [config] * len(ids))
        assert all(len(each.m_generation_ids[0]) == tokens for each in done)

    measure(session, generate)
    session.finish()


if __name__ == "__main__":
    main(*sys.argv[1:])
