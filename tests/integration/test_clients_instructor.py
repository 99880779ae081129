"""`instructor`, in an environment of its own (it wants another openai than our tests do), against a real server.
It asks for a form in each of the ways that it has, reads what comes, and asks again where that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infer import Engine
from integration.documented_code import told
from integration.live_server import LiveServer, live_server

pytestmark = [pytest.mark.heavy, pytest.mark.model]

ROW = "TOOLS-STRUCTURED-CORE"
SCRIPT = '''
import json, sys
from typing import Literal

import instructor
import openai
from pydantic import BaseModel, Field, field_validator

url, mode = sys.argv[1:]
refused = []


class City(BaseModel):
    """A city that the text names."""

    name: Literal["Oslo", "Rome"]
    country: str = Field(max_length=12, pattern="^[A-Z][a-z]+$")
    inhabitants: int = Field(ge=1, le=9_999_999)

    @field_validator("inhabitants")
    @classmethod
    def not_at_once(cls, value: int) -> int:
        if not refused:
            refused.append(value)
            raise ValueError("count again")
        return value


plain = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
client = instructor.from_openai(plain, mode=instructor.Mode[mode])
city, reply = client.chat.completions.create_with_completion(
    model=plain.models.list().data[0].id,
    response_model=City,
    max_retries=2,
    messages=[{"role": "user", "content": "Oslo is the capital of Norway and has 700000 inhabitants."}],
    temperature=0,
    max_tokens=200,
)
print(json.dumps({"city": city.model_dump(), "refused": len(refused), "finish": reply.choices[0].finish_reason}))
'''


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment with instructor and what it requires, nothing of ours."""
    directory = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", str(directory)], check=True, timeout=300)
    command = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "instructor>=1.17,<2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, told(done)
    return directory / "bin" / "python"


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    settings = {"model": {"ref": str(smollm2_gguf), "max_model_len": 2048}, "cache": {"num_blocks": 256}}
    with live_server(lambda config: Engine(config), **settings) as running:
        yield running


@pytest.mark.row(ROW, "the instructor client's structured extraction, a refused answer asked for again")
@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA"])
def test_a_structured_extraction(python: Path, server: LiveServer, mode: str) -> None:
    command = [str(python), "-I", "-c", SCRIPT, server.url, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, told(done)
    said: dict[str, Any] = json.loads(done.stdout)
    assert said["city"]["name"] in ("Oslo", "Rome") and 1 <= said["city"]["inhabitants"] <= 9_999_999
    assert said["refused"] == 1, "its second question has the first answer and what was wrong with it"
