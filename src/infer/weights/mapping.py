"""From checkpoint tensor names to parameters: what each model states, and the check that nothing is left over.

Pure data; used on the worker thread while planning and loading.
"""

from __future__ import annotations

import difflib
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from infer.errors import WeightError

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Target:
    """Where a checkpoint tensor goes: the dotted path of a parameter, and the rows of it that the tensor fills."""

    path: str
    rows: tuple[int, int] | None = None
    """First row and the row after the last; None for the whole parameter."""
    transposed: bool = False
    """The checkpoint has the tensor's columns as rows."""

    def stored_shape(self, parameter: Shape) -> Shape:
        """What the checkpoint must have, for a parameter of that shape."""
        start, stop = self.rows if self.rows is not None else (0, parameter[0])
        shape = (stop - start, *parameter[1:])
        return shape[::-1] if self.transposed else shape


class WeightTable:
    """Every checkpoint tensor's destination. Built by a model, then only read."""

    def __init__(self) -> None:
        self.targets: dict[str, Target] = {}
        self.scalars: dict[str, str] = {}
        """Tensors of one number that a checkpoint may have, and the dotted path of what takes it."""
        self.ignored: set[str] = set()
        self.left_out: list[str] = []
        """Prefixes of names: parts of a checkpoint that the model does not have."""

    def add(self, name: str, path: str, *, rows: tuple[int, int] | None = None, transposed: bool = False) -> None:
        """One tensor to one parameter. `transposed`: the checkpoint has it as [input, output] features (GPT-2's Conv1D)."""
        if name in self.targets:
            raise WeightError(f"tensor {name!r} is mapped twice: to {self.targets[name].path} and {path}", tensor=name)
        self.targets[name] = Target(path, rows, transposed)

    def add_shards(self, path: str, shards: Iterable[tuple[str, int]]) -> None:
        """Tensors (name, number of rows) that lie one after the other in one parameter."""
        start = 0
        for name, count in shards:
            self.add(name, path, rows=(start, start + count))
            start += count

    def add_scalar(self, name: str, path: str) -> None:
        """One number, if the checkpoint has it, to `Layer.load_scalar` of the layer before the path's last dot."""
        self.scalars[name] = path

    def ignore(self, names: Iterable[str]) -> None:
        """Tensors a checkpoint may carry that the model does not need."""
        self.ignored.update(names)

    def leave_out(self, part: str) -> None:
        """Everything below this module, e.g. "model.layers.61" for a multi-token-prediction layer that is not run."""
        self.left_out.append(f"{part}.")

    def check(self, stored: Mapping[str, Shape], parameters: Mapping[str, Shape]) -> None:
        """Every stored tensor has one destination of its shape, and every row of every parameter one source.

        `stored` and `parameters` are name -> shape. Raises `WeightError` naming the first culprit.
        """
        self._check_names(stored)
        covered: dict[str, list[tuple[int, int, str]]] = {path: [] for path in parameters}
        for name, target in self.targets.items():
            if target.path not in parameters:
                raise WeightError(f"tensor {name!r} goes to {target.path}, which the model does not have", tensor=name)
            start, stop = target.rows if target.rows is not None else (0, parameters[target.path][0])
            expected = target.stored_shape(parameters[target.path])
            if tuple(stored[name]) != expected:
                raise WeightError(
                    f"tensor {name!r} has shape {tuple(stored[name])} in the checkpoint, "
                    f"but the configuration calls for {expected}",
                    tensor=name,
                )
            covered[target.path].append((start, stop, name))
        for name in self.scalars.keys() & stored.keys():
            if any(size != 1 for size in stored[name]):
                raise WeightError(
                    f"tensor {name!r} has shape {tuple(stored[name])}, and is one number here", tensor=name
                )
        for path, spans in covered.items():
            _check_coverage(path, parameters[path][0], sorted(spans))

    def _check_names(self, stored: Mapping[str, Shape]) -> None:
        missing = [name for name in self.targets if name not in stored]
        known = self.targets.keys() | self.scalars.keys() | self.ignored
        unused = (name for name in stored if name not in known)
        extra = [name for name in unused if not name.startswith(tuple(self.left_out))]
        if missing:
            near = difflib.get_close_matches(missing[0], extra, n=1)
            raise WeightError(
                f"the checkpoint lacks {_few(missing)}" + (f"; it has {near[0]!r}, which is not used" if near else ""),
                tensor=missing[0],
            )
        if extra:
            raise WeightError(
                f"the checkpoint holds {_few(extra)}, which this architecture does not use: "
                "it belongs to another architecture or variant",
                tensor=extra[0],
            )


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return f"tensor {shown}" if len(names) == 1 else f"{len(names)} tensors: {shown}{', ...' if len(names) > 3 else ''}"


def _check_coverage(path: str, rows: int, spans: Sequence[tuple[int, int, str]]) -> None:
    reached = 0
    for start, stop, name in spans:
        if start != reached:
            fault = "has no source for" if start > reached else "has two sources for"
            raise WeightError(f"{path} {fault} rows {min(start, reached)}..{max(start, reached)}", tensor=name)
        reached = stop
    if reached != rows:
        raise WeightError(f"{path} has no tensor for rows {reached}..{rows}", tensor=spans[-1][2] if spans else None)


def decoder_table(
    *,
    num_layers: int,
    q_rows: int | None,
    kv_rows: int = 0,
    intermediate_size: int,
    tied: bool,
    norms: Mapping[str, str],
    qkv_bias: bool = False,
    out_bias: bool = False,
    mlp_bias: bool = False,
    dense: Container[int] | None = None,
) -> WeightTable:
    """The Hugging Face names of a Llama-like decoder, for models assembled as `layers.decoder.Decoder`.

    `norms` maps the part after "model.layers.N." to the path inside a block, both without ".weight". Without `q_rows`
    the attention is the caller's to add (`add_latent_attention`). `dense` says which layers have a plain MLP (None: all);
    the experts of the others are the caller's to add (`add_experts`).
    """
    table = WeightTable()
    table.add("model.embed_tokens.weight", "embedding.weight")
    for i in range(num_layers):
        hf, block = f"model.layers.{i}", f"blocks.{i}"
        kinds = [("weight", True, True, True), ("bias", qkv_bias, out_bias, mlp_bias)]
        for kind, qkv, out, mlp in kinds:
            if qkv and q_rows is not None:
                rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
                shards = [(f"{hf}.self_attn.{part}_proj.{kind}", count) for part, count in rows.items()]
                table.add_shards(f"{block}.attention.qkv.{kind}", shards)
            if out and q_rows is not None:
                table.add(f"{hf}.self_attn.o_proj.{kind}", f"{block}.attention.out.{kind}")
            if mlp and (dense is None or i in dense):
                shards = [(f"{hf}.mlp.{part}_proj.{kind}", intermediate_size) for part in ("gate", "up")]
                table.add_shards(f"{block}.mlp.gate_up.{kind}", shards)
                table.add(f"{hf}.mlp.down_proj.{kind}", f"{block}.mlp.down.{kind}")
        for name, path in norms.items():
            table.add(f"{hf}.{name}.weight", f"{block}.{path}.weight")
        for part in ("k", "v"):  # of an 8-bit KV cache: compressed-tensors' names, and ModelOpt's
            for name in (f"{part}_scale", f"{part}_proj.{part}_scale"):
                table.add_scalar(f"{hf}.self_attn.{name}", f"{block}.attention.attention.{part}_scale")
    table.add("model.norm.weight", "norm.weight")
    table.ignore(f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(num_layers))
    table.ignore(["model.rotary_emb.inv_freq"])
    if tied:
        table.ignore(["lm_head.weight"])
    else:
        table.add("lm_head.weight", "head.weight")
    return table


def add_experts(
    table: WeightTable,
    hf: str,
    path: str,
    *,
    num_experts: int,
    hidden_size: int,
    intermediate_size: int,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> None:
    """The experts "<hf>.<e>.<name>.weight", stacked into `layers.moe.SparseMoE`'s "<path>.gate_up" and "<path>.down"."""
    gate, up, down = names
    both = [(f"{hf}.{e}.{name}.weight", intermediate_size) for e in range(num_experts) for name in (gate, up)]
    table.add_shards(f"{path}.gate_up", both)
    table.add_shards(f"{path}.down", [(f"{hf}.{e}.{down}.weight", hidden_size) for e in range(num_experts)])


def add_latent_attention(table: WeightTable, hf: str, path: str, *, low_rank_queries: bool, bias: bool) -> None:
    """The tensors below "<hf>." of a `layers.latent_attention.LatentAttention` at "<path>."."""
    names = {"kv_a_proj_with_mqa": "kv_a", "kv_b_proj": "kv_b", "o_proj": "out", "kv_a_layernorm": "kv_norm"}
    if low_rank_queries:
        names |= {"q_a_proj": "q_a", "q_a_layernorm": "q_norm", "q_b_proj": "q_b"}
    else:
        names |= {"q_proj": "q_b"}
    for name, part in names.items():
        table.add(f"{hf}.{name}.weight", f"{path}.{part}.weight")
        if bias and name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj"):
            table.add(f"{hf}.{name}.bias", f"{path}.{part}.bias")


def add_shared_expert(table: WeightTable, hf: str, path: str, intermediate_size: int) -> None:
    """The MLP "<hf>.<part>_proj.weight" that every token visits, as `layers.moe.SparseMoE`'s "<path>"."""
    table.add_shards(
        f"{path}.gate_up.weight", [(f"{hf}.{part}_proj.weight", intermediate_size) for part in ("gate", "up")]
    )
    table.add(f"{hf}.down_proj.weight", f"{path}.down.weight")
