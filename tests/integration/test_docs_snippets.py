"""Every Python and shell block of the documentation runs as it is printed."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infer.config.engine import EngineConfig
from infer.config.env import read_environment
from infer.config.files import load_config
from integration.documented_code import PAGES, ROOT, Block, blocks, documented_server, run, told

PACKAGES = ROOT / "docs" / "plugins"
"""Pages that show a whole package: plugin_package/test_templates.py installs each and runs its kit."""
PYTHON = [block for block in blocks("python") if block.page.parent != PACKAGES]
SHELL = [
    (block, line)
    for block in blocks("sh")
    for line in block.text.splitlines()
    if line.strip() and block.page.parent != PACKAGES
]
SERVED = "http://127.0.0.1:8000"


def test_the_pages_have_code() -> None:
    """The two tests below would pass on no code at all."""
    assert {block.page.name for block in PYTHON} >= {"README.md", "quickstart.md", "embedding.md"}
    assert any(line.startswith("infer run") for _, line in SHELL)


def test_every_fence_says_its_language() -> None:
    """A block marked python3 or shell would escape the tests below."""
    for page in PAGES:
        fences = re.findall(r"^```(.*)$", page.read_text("utf-8"), re.MULTILINE)
        assert len(fences) % 2 == 0, page
        assert set(fences[::2]) <= {"", "python", "sh", "yaml"}, page
        assert set(fences[1::2]) <= {""}, page


@pytest.fixture(scope="module")
def server(test_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where the documented server listens during these tests; on the pages it is port 8000."""
    with documented_server(test_cache, tmp_path_factory.mktemp("server")) as address:
        yield address


@pytest.mark.model
@pytest.mark.platform("cpu", "it runs as a reader would run it, on the default platform")
@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.name)
def test_python_block_runs(block: Block, test_cache: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    text = block.text
    if SERVED in text:
        text = text.replace(SERVED, request.getfixturevalue("server"))
    script = tmp_path / "snippet.py"
    script.write_text(text, "utf-8")
    done = run([sys.executable, "-W", "error::ResourceWarning", str(script)], test_cache, cwd=tmp_path)
    assert done.returncode == 0, told(done)
    assert done.stdout.strip(), "a snippet that shows nothing shows the reader nothing"
    assert "Traceback" not in done.stderr, told(done)


@pytest.mark.parametrize("block", blocks("yaml"), ids=lambda block: block.name)
def test_yaml_block_is_a_configuration(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(block.text, "utf-8")
    config = load_config({}, path, read_environment({}))
    assert config != EngineConfig()


@pytest.mark.model
@pytest.mark.platform("cpu", "it runs as a reader would run it, on the default platform")
@pytest.mark.parametrize(("block", "line"), SHELL, ids=lambda value: value if isinstance(value, str) else value.name)
def test_shell_line_works(
    block: Block, line: str, test_cache: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """`infer` commands are run. Of the others, those that install or test all of this again are checked for existing."""
    words = shlex.split(line)
    if SERVED in line:
        line = line.replace(SERVED, request.getfixturevalue("server"))
    if line == "infer serve":
        assert request.getfixturevalue("server").startswith("http://127.0.0.1:")
    elif "infer" in words:
        done = run(["sh", "-c", line], test_cache, cwd=tmp_path)
        assert done.returncode == 0, told(done)
        assert done.stdout.strip(), told(done)
    elif words[0] == "tests/gpu/run.sh":
        done = run(words, test_cache, cwd=ROOT)
        assert done.returncode == 0 and done.stdout.strip(), told(done)
    elif words[0] == "make":
        done = run(["make", "--dry-run", *words[1:]], test_cache, cwd=ROOT)
        assert done.returncode == 0, told(done)
    else:
        assert line == "pip install .", f"{block.name}: teach this test what {line!r} should do"
