"""The engine inside an application: nothing of the process is changed, nothing is left behind, wherever it is started.
Each check runs in a fresh interpreter on a random tiny Llama; the scripts below are what a user would write."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .engine_support import ARCHITECTURES, write_checkpoint

own_program = pytest.mark.platform("cpu", "it starts a program of a library's user, who gets the default platform")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("llama"), ARCHITECTURES["llama"])


def run_script(text: str, *arguments: object, cwd: Path) -> list[Any]:
    """Run a script file in a fresh interpreter; the JSON lines it prints."""
    script = cwd / "script.py"
    script.write_text(text)
    command = [sys.executable, str(script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr and "Warning" not in done.stderr, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


SNAPSHOT = """
import gc, json, locale, logging, multiprocessing, os, pickle, random, signal, sys, threading, time, warnings
import anyio, numpy, prometheus_client, torch

def files():
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink("/proc/self/fd/" + fd))
        except OSError:
            pass
    return sorted(f for f in found if not f.startswith("/proc"))

def snapshot():
    root = logging.getLogger()
    return {
        "signal handlers": {s.name: repr(signal.getsignal(s)) for s in signal.Signals},
        "wakeup fd": signal.set_wakeup_fd(-1),
        "root logger": [list(map(repr, root.handlers)), root.level, list(map(repr, root.filters)), root.disabled],
        "log level of the library": logging.getLogger("infer").level,
        "logger class": repr(logging.getLoggerClass()), "logging.disable": root.manager.disable,
        "environment": dict(os.environ),
        "torch dtype": str(torch.get_default_dtype()), "torch device": str(torch.get_default_device()),
        "torch threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
        "torch rng": torch.get_rng_state().tolist(), "torch grad": torch.is_grad_enabled(),
        "torch inference": torch.is_inference_mode_enabled(),
        "torch deterministic": torch.are_deterministic_algorithms_enabled(),
        "torch matmul": torch.get_float32_matmul_precision(),
        "torch mkldnn": torch.backends.mkldnn.enabled,
        "random": repr(random.getstate()), "numpy rng": repr(numpy.random.get_state()),
        "numpy errors": numpy.geterr(), "numpy print": repr(numpy.get_printoptions()),
        "warnings": list(map(repr, warnings.filters)), "showwarning": repr(warnings.showwarning),
        "sys.path": list(sys.path), "meta path": list(map(repr, sys.meta_path)), "cwd": os.getcwd(),
        "excepthooks": [repr(sys.excepthook), repr(threading.excepthook), repr(sys.unraisablehook)],
        "displayhook": repr(sys.displayhook), "recursion": sys.getrecursionlimit(),
        "switch interval": sys.getswitchinterval(), "gc": [gc.isenabled(), gc.get_threshold()],
        "streams": [repr(sys.stdout), repr(sys.stderr)], "locale": locale.setlocale(locale.LC_ALL),
        "start method": multiprocessing.get_start_method(allow_none=True),
        "prometheus": sorted(prometheus_client.REGISTRY._names_to_collectors),
        "threads": sorted(t.name for t in threading.enumerate()), "files": files(),
        "children": len(multiprocessing.active_children()),
        "affinity": sorted(os.sched_getaffinity(0)), "nice": os.nice(0),
    }

def differences(before, after):
    return {name: [before[name], after[name]] for name in before if before[name] != after[name]}
"""

FULL_RUN = (
    SNAPSHOT
    + """
import tokenizers
torch.manual_seed(11); random.seed(12); numpy.random.seed(13)
torch.set_num_threads(2)
os.environ["INFER_SCHEDULER__MAX_NUM_SEQS"] = "3"     # read by from_env and the command line only
logging.getLogger().addHandler(logging.NullHandler())
before = snapshot()
from infer import Engine, EngineConfig, SamplingParams

async def main(path):
    config = EngineConfig(model={"ref": path, "dtype": "float32"}, platform={"threads": 1}, cache={"num_blocks": 64})
    async with Engine(config) as engine:
        assert engine.resolved.scheduler.max_num_seqs == 64
        many = await engine.generate_many(["one", [5, 6], "three"], SamplingParams(max_tokens=6, ignore_eos=True))
        async with engine.stream("x", SamplingParams(max_tokens=50, ignore_eos=True, n=2, logprobs=1)) as stream:
            async for delta in stream:
                break
        try:
            await engine.generate([10**6])
        except Exception as error:
            assert type(error).__name__ == "InvalidRequestError", error
        during = snapshot()
    return [len(c.token_ids) for c in many], during

lengths, during = anyio.run(main, sys.argv[1], backend=sys.argv[2])
after = snapshot()
own = {"threads", "files", "wakeup fd", "signal handlers"}  # an event loop has these while it runs, we have one thread
print(json.dumps(lengths))
print(json.dumps(differences(before, after)))
print(json.dumps([name for name in differences(before, during) if name not in own]))
print(json.dumps([t for t in during["threads"] if t not in before["threads"] and "AnyIO" not in t]))

async def fail(path):
    async with Engine(EngineConfig(model={"ref": path}, platform={"threads": 1})):
        raise AssertionError("started")
for path in (sys.argv[1] + "/nothing", sys.argv[3]):
    try:
        anyio.run(fail, path, backend=sys.argv[2])
    except Exception as error:
        print(json.dumps([type(error).__name__, differences(before, snapshot())]))
"""
)


@own_program
@pytest.mark.row(
    "X-EMBED", "signal handlers, root logger, Prometheus registry, environment, torch and RNG state are equal"
)
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_full_run_changes_nothing_of_the_process(model: Path, tmp_path: Path, backend: str) -> None:
    """Before and after a run, while it serves, and after engines that fail to start."""
    broken = write_checkpoint(tmp_path / "broken", ARCHITECTURES["llama"])
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    lengths, changed, while_serving, threads, *failed = run_script(FULL_RUN, model, backend, broken, cwd=tmp_path)
    assert lengths == [6, 6, 6]
    assert changed == {}
    assert while_serving == []
    assert threads == ["infer-worker"]
    assert [[name, {}] for name in ("ModelError", "WeightError")] == failed


def test_the_snapshot_notices_changes(model: Path, tmp_path: Path) -> None:
    """The comparison above can fail: a program that does change these things is seen to."""
    script = (
        SNAPSHOT
        + """
before = snapshot()
logging.basicConfig(); os.environ["X"] = "1"; torch.set_default_dtype(torch.float64); torch.rand(1)
torch.set_num_threads(torch.get_num_threads() + 1); signal.signal(signal.SIGTERM, signal.SIG_IGN); random.random()
warnings.simplefilter("ignore"); sys.path.append("x"); held = open("script.py")
prometheus_client.Counter("x", "x"); numpy.random.rand(); torch.set_grad_enabled(False)
threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
print(json.dumps(sorted(differences(before, snapshot()))))
"""
    )
    (noticed,) = run_script(script, cwd=tmp_path)
    assert noticed == sorted(
        [
            *("root logger", "environment", "torch dtype", "torch rng", "torch threads", "signal handlers", "random"),
            *("warnings", "sys.path", "files", "prometheus", "numpy rng", "torch grad", "threads"),
        ]
    )


PROGRAM = """
from infer import Engine, EngineConfig, SamplingParams
import json, sys
config = EngineConfig(model={"ref": sys.argv[1], "dtype": "float32"}, platform={"threads": 1})
with Engine.blocking(config) as engine:
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    answers = engine.generate_many(["The fox", "The dog", [5, 6, 7]], params)
    pieces = [delta.token_ids for delta in engine.stream("The fox", params)]
print(json.dumps([[answer.token_ids for answer in answers], sum(map(list, pieces), [])]))
"""
DRIVER = """
import asyncio, multiprocessing, os, sys, threading
source = open("program.py").read()
def run():
    exec(compile(source, "program.py", "exec"), {"__name__": "not_main"})
def left():
    assert threading.enumerate() == [threading.main_thread()], threading.enumerate()
    assert not multiprocessing.active_children()
    links = [os.path.realpath("/proc/self/fd/" + fd) for fd in os.listdir("/proc/self/fd")]
    assert not [link for link in links if sys.argv[1] in link], links
run(); run(); left()                                              # twice in one process
thread = threading.Thread(target=run); thread.start(); thread.join(); left()
async def main(): run()
asyncio.run(main()); left()                                       # inside a running event loop
threads = [threading.Thread(target=run) for _ in range(2)]        # two at once
[t.start() for t in threads]; [t.join() for t in threads]; left()
"""


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the ten lines print as a script without a __main__ guard."""
    assert len(PROGRAM.strip().splitlines()) <= 10
    (printed,) = run_script(PROGRAM, model, cwd=tmp_path_factory.mktemp("plain"))
    return printed


@own_program
@pytest.mark.row("SERVE-CPP-API", "the same 10-line program works as a plain script without a __main__ guard")
@pytest.mark.row("SERVE-CPP-API", "`generate_many` keeps order; the blocking facade is the same engine behind a portal")
def test_ten_lines_as_a_plain_script(plain: Any) -> None:
    answers, streamed = plain
    assert [len(answer) for answer in answers] == [8, 8, 8] and streamed == answers[0]
    assert len({tuple(answer) for answer in answers}) == 3


@own_program
@pytest.mark.row(
    "SERVE-CPP-API", "in a worker thread, twice in one process, inside a running loop; nothing stays behind"
)
def test_ten_lines_elsewhere(plain: Any, model: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    assert run_script(DRIVER, model, cwd=tmp_path) == [plain] * 6


ASYNC = """
from infer import Engine, EngineConfig, SamplingParams
import asyncio, json, sys
config = EngineConfig(model={"ref": sys.argv[1], "dtype": "float32"}, platform={"threads": 1})
async def main():
    async with Engine(config) as engine:
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        answers = await engine.generate_many(["The fox", "The dog", [5, 6, 7]], params)
        async with engine.stream("The fox", params) as stream:
            pieces = [delta.token_ids async for delta in stream]
    print(json.dumps([[answer.token_ids for answer in answers], sum(map(list, pieces), [])]))
loop = asyncio.new_event_loop()
loop.run_until_complete(main())  # as a notebook does: the loop lives on, one cell after the other
loop.run_until_complete(main())
"""


@own_program
@pytest.mark.row("SERVE-CPP-API", "in a notebook loop")
def test_cells_of_one_lasting_loop(plain: Any, model: Path, tmp_path: Path) -> None:
    assert run_script(ASYNC, model, cwd=tmp_path) == [plain, plain]


CYCLES = """
import gc, json, multiprocessing, os, sys, threading
import anyio
from infer import Engine, EngineConfig, SamplingParams
from infer.backends.reference.memory import resident_bytes
config = EngineConfig(model={"ref": sys.argv[1], "dtype": "float32"}, platform={"threads": 1},
                      scheduler={"max_num_seqs": 4, "max_num_batched_tokens": 32})
async def cycle():
    async with Engine(config) as engine:
        await engine.generate([5, 6, 7], SamplingParams(max_tokens=3, ignore_eos=True))
def held():
    return [sorted(t.name for t in threading.enumerate()), len(os.listdir("/proc/self/fd")),
            len(multiprocessing.active_children()), len(os.listdir("/proc/self/task"))]
first, levels = None, []
for index in range(int(sys.argv[2])):
    anyio.run(cycle)
    gc.collect()
    levels.append(resident_bytes())
    first = first or held()
print(json.dumps([first, held(), levels]))
"""


def check_lives(model: Path, tmp_path: Path, count: int) -> None:
    ((first, last, levels),) = run_script(CYCLES, model, count, cwd=tmp_path)
    assert first == last and first[0] == ["MainThread"] and first[2] == 0
    assert len(levels) == count and levels[-1] - levels[4] < 20e6


@own_program
def test_ten_lives_leave_nothing(model: Path, tmp_path: Path) -> None:
    check_lives(model, tmp_path, 10)


@pytest.mark.heavy
@pytest.mark.row("ENG-CORE-BUSY-LOOP", "100 start/stop cycles leave no thread, child process or open file")
def test_a_hundred_lives_leave_nothing(model: Path, tmp_path: Path) -> None:
    check_lives(model, tmp_path, 100)


@pytest.mark.heavy
@pytest.mark.row("SERVE-CPP-API", "ten loads and closes of a model do not grow memory, and leave nothing behind")
def test_ten_loads_do_not_grow_memory(tmp_path: Path) -> None:
    """300 MB of weights: one copy left behind would show ten times over."""
    config = ARCHITECTURES["llama"] | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
    config |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64}
    path = write_checkpoint(tmp_path / "model", config)
    ((first, last, levels),) = run_script(CYCLES, path, 10, cwd=tmp_path)
    assert first == last
    # A level is read while the allocator may still hold a buffer; what stays behind shows in all that follow.
    assert min(levels[-3:]) - levels[1] < 30e6
