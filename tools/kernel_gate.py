"""Compiles every launch of the GPU kernels for every target, without a GPU, and holds what it costs against a budget.

python tools/kernel_gate.py [--update] [--only WORD] [--targets sm_90,...]; the budget is tests/gpu/kernel_budgets.tsv.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from kernel_cases import Launched, record
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from infer.backends.cuda.device import DeviceFacts

BUDGETS = Path(__file__).parents[1] / "tests" / "gpu" / "kernel_budgets.tsv"
HEADER = ("kernel", "launch", "target", "registers", "spilled bytes", "shared bytes", "products")
PRODUCTS = ("wgmma", "tcgen05.mma", "mma.sync", "v_mfma")
"""Instructions of matrix units, best first."""
TYPES = {
    "bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64", "float8_e4m3fn": "fp8e4nv",
    "int8": "i8", "int16": "i16", "int32": "i32", "int64": "i64", "uint8": "u8", "bool": "i1",
}  # fmt: skip
"""torch's name -> Triton's."""


@dataclass(frozen=True)
class Target:
    """What is compiled for, and the facts of its smallest card."""

    name: str
    backend: str
    arch: int | str
    warp: int
    facts: DeviceFacts


def _hopper(multiprocessors: int) -> DeviceFacts:
    return DeviceFacts(
        multiprocessors=multiprocessors, shared_memory=232448, native_fp8=True, asynchronous_products=True
    )


TARGETS = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, DeviceFacts(multiprocessors=108, shared_memory=166912, native_fp8=False)),
        Target("sm_90", "cuda", 90, 32, _hopper(132)),
        Target("sm_100", "cuda", 100, 32, _hopper(148)),
        Target("gfx942", "hip", "gfx942", 64, DeviceFacts(multiprocessors=304, shared_memory=65536, native_fp8=False)),
    )
}


@dataclass(frozen=True)
class Job:
    """One compilation: a launch as Triton's own launcher specialises it."""

    module: str
    kernel: str
    case: str
    target: str
    signature: tuple[tuple[str, str], ...]
    constants: tuple[tuple[str, Any], ...]
    aligned: tuple[int, ...]
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Cost:
    """Per thread registers and spilled bytes, per program bytes of shared memory, and the matrix instruction it uses."""

    registers: int
    spilled: int
    shared: int
    products: str


def jobs(targets: list[Target], only: str) -> Iterator[Job]:
    """Every different compilation once, under the name of the first launch that needs it."""
    seen = set()
    for target in targets:
        for launched in record(target.facts):
            job = specialise(launched, target)
            key = (job.kernel, target.name, job.signature, job.constants, job.aligned, job.num_warps, job.num_stages)
            if key not in seen and only in f"{job.kernel} {job.case}":
                seen.add(key)
                yield job


def specialise(launched: Launched, target: Target) -> Job:
    """As Triton's launcher: 1 is a constant, multiples of 16 and addresses of 16 bytes are known to be such."""
    names = [parameter.name for parameter in launched.kernel.params]
    constants = dict(launched.constants)
    signature, aligned = {}, []
    for index, (name, value) in enumerate(zip(names, launched.arguments, strict=False)):
        if isinstance(value, torch.Tensor):
            signature[name] = "*" + TYPES[str(value.dtype).removeprefix("torch.")]
            if value.storage_offset() * value.element_size() % 16 == 0:
                aligned.append(index)
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            constants[name] = 1
        else:
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if value % 16 == 0:
                aligned.append(index)
    unknown = set(launched.kernel.arg_names) - set(signature) - set(constants)
    if unknown or len(launched.arguments) + len(launched.constants) != len(names):
        raise TypeError(f"{launched.kernel.__name__}: the launch does not match the kernel: {sorted(unknown)}")
    full = [(name, signature.get(name, "constexpr")) for name in names]
    return Job(
        module=launched.kernel.fn.__module__,
        kernel=launched.kernel.fn.__name__,
        case=launched.case,
        target=target.name,
        signature=tuple(full),
        constants=tuple(sorted(constants.items())),
        aligned=tuple(aligned),
        num_warps=launched.num_warps,
        num_stages=launched.num_stages,
    )


def compile_job(job: Job) -> Cost | str:
    """What it costs, or why it does not compile."""
    target = TARGETS[job.target]
    kernel = getattr(sys.modules[job.module], job.kernel)
    constants = {(kernel.arg_names.index(name),): value for name, value in job.constants}
    attributes = {(index,): [["tt.divisibility", 16]] for index in job.aligned}
    source = ASTSource(kernel, dict(job.signature), constants, attributes)
    options = {"num_warps": job.num_warps, "num_stages": job.num_stages}
    try:
        compiled = triton.compile(source, GPUTarget(target.backend, target.arch, target.warp), options)
    except Exception as error:  # the compiler's own, of many kinds
        reason = str(error).strip() or type(error).__name__
        return re.sub(r"\s+", " ", reason)[-200:]  # the cause comes last
    assembly = compiled.asm["amdgcn" if target.backend == "hip" else "ptx"]
    products = next((name for name in PRODUCTS if name in assembly), "-")
    if target.backend == "hip":
        return _amd_cost(assembly, compiled.metadata.shared, products)
    return _nvidia_cost(compiled.asm["cubin"], compiled.metadata.shared, products)


def _nvidia_cost(cubin: bytes, shared: int, products: str) -> Cost:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.cuobjdump.path
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True)
    usage = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text.stdout))
    return Cost(int(usage["REG"]), int(usage["STACK"]) + int(usage["LOCAL"]), shared, products)


def _amd_cost(assembly: str, shared: int, products: str) -> Cost:
    found = {name: int(value) for name, value in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s*(\d+)", assembly)}
    return Cost(found["vgpr_count"], 4 * found["vgpr_spill_count"], shared, products)


def read_budgets() -> dict[tuple[str, str, str], Cost | str]:
    """(kernel, launch, target) -> budget; text where it is known not to compile, which says why."""
    found: dict[tuple[str, str, str], Cost | str] = {}
    for line in BUDGETS.read_text("utf-8").splitlines()[1:]:
        kernel, case, target, *rest = line.split("\t")
        found[kernel, case, target] = _cost(rest) if len(rest) == 4 else rest[0]
    return found


def _cost(fields: list[str]) -> Cost:
    registers, spilled, shared, products = fields
    return Cost(int(registers), int(spilled), int(shared), products)


def run(todo: list[Job], workers: int) -> dict[tuple[str, str, str], Cost | str]:
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_load) as pool:
        found = {}
        print("\t".join(HEADER))
        for job, cost in zip(todo, pool.map(compile_job, todo, chunksize=4), strict=True):
            key = (job.kernel, job.case, job.target)
            found[key] = cost
            print("\t".join([*key, *fields(cost)]), flush=True)
        return found


def _load() -> None:
    """The kernels' modules in a worker."""
    record(TARGETS["sm_90"].facts)


def fields(cost: Cost | str) -> list[str]:
    return [cost] if isinstance(cost, str) else [str(n) for n in dataclasses.astuple(cost)]


def complaints(
    found: dict[tuple[str, str, str], Cost | str], budgets: dict[tuple[str, str, str], Cost | str]
) -> Iterator[str]:
    """Where a launch needs more than it may, or something new has no budget."""
    for key, cost in found.items():
        where, budget = " / ".join(key), budgets.get(key)
        if budget is None:
            yield f"{where}: no budget; run tools/kernel_gate.py --update and look at the difference"
        elif isinstance(cost, str):
            if not isinstance(budget, str):
                yield f"{where}: does not compile: {cost}"
        elif isinstance(budget, str):
            yield f"{where}: compiles now, which the budget does not know"
        else:
            for what in ("registers", "spilled", "shared"):
                if getattr(cost, what) > getattr(budget, what):
                    yield f"{where}: {what} {getattr(cost, what)}, budget {getattr(budget, what)}"
            if cost.products != budget.products:
                yield f"{where}: products by {cost.products}, budget {budget.products}"
            if cost.shared > TARGETS[key[2]].facts.shared_memory:
                yield f"{where}: {cost.shared} bytes of shared memory, the card has less"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write what is found as the budget")
    parser.add_argument("--only", default="", help="launches whose name holds this")
    parser.add_argument("--targets", default=",".join(TARGETS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    todo = list(jobs([TARGETS[name] for name in arguments.targets.split(",")], arguments.only))
    found = run(todo, arguments.jobs)
    if arguments.update:
        budgets = read_budgets() if BUDGETS.exists() else {}
        if not arguments.only:
            budgets = {key: cost for key, cost in budgets.items() if key[2] not in arguments.targets.split(",")}
        budgets |= found
        lines = ["\t".join([*key, *fields(cost)]) for key, cost in sorted(budgets.items())]
        BUDGETS.write_text("\n".join(["\t".join(HEADER), *lines]) + "\n", "utf-8")
        return 0
    wrong = list(complaints(found, read_budgets()))
    print("\n".join(wrong), file=sys.stderr)
    print(f"Triton {triton.__version__}: {len(found)} compilations, {len(wrong)} complaints", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
