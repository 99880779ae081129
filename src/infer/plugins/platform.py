"""Contract of a platform: where tensors live and which kernels run there (hook `infer_platforms`).

Called once at start; the `Ops` table it returns is called by layers on the worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

from infer.config.platform import PlatformLimits

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from torch import Tensor

API_VERSION = 1
KVScales = tuple[float, float]
"""What keys and values of a layer are divided by when an 8-bit cache stores them."""
UNSCALED: KVScales = (1.0, 1.0)


@dataclass(frozen=True, slots=True)
class Probe:
    """Whether a platform can run here. `reason` says why not."""

    available: bool
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlatformSpec:
    """A platform by name. The engine takes the available one with the highest priority unless the config names one."""

    name: str
    api: int
    factory: str
    """"module:attr", called as `factory(threads: int | None) -> Platform`."""
    probe: str
    """"module:attr", called with nothing, returns `Probe`; must not allocate device memory."""
    priority: int = 0
    compiles: bool = False
    """The factory also takes `cache_dir: Path`, a directory that keeps what is compiled for this machine, and
    `progress: ProgressCallback | None`, which is told before a build that takes seconds."""
    settings: tuple[str, ...] = ()
    """Which of the settings of section `platform` that only some have the factory takes, by their names: "cpus" (`cpus:
    tuple[int, ...]`, those its threads run on) and "kernels" (`kernels: Path`, a directory that `prebuild` has filled). They
    are given when the operator states them. "numerics" (`numerics: str`) is always given: `numerics.mode`, for platforms that
    have other kernels for "invariant"."""
    prebuild: str | None = None
    """"module:attr", called as `prebuild(directory: Path, levels: tuple[str, ...], progress) -> list[Path]` by `infer kernels
    build`: what the factory would compile, for other machines; no levels: for all it knows. None: nothing to build."""
    example: dict[str, Any]
    """Keyword arguments for the factory under the conformance kit, e.g. {"threads": 1}."""


@dataclass(slots=True)
class AttentionMetadata:
    """One KV group's view of a step's rows. R rows, T tokens in all. Built once a step, read by every layer of the group."""

    query_starts: Tensor
    """[R + 1] int32: row r owns tokens query_starts[r] .. query_starts[r + 1]."""
    seq_lens: Tensor
    """[R] int32: context length of the row including this step's tokens."""
    block_table: Tensor
    """[R, max_blocks] int32; entries past the row's blocks, and blocks dropped by a sliding window, are 0 (the null block)."""
    slot_mapping: Tensor
    """[T] int64: flat cache position (block * block_size + offset) each token's key and value are written to."""
    query_lens_host: list[int]
    seq_lens_host: list[int]
    num_decode_rows: int
    """Leading rows with exactly one token; the builder orders rows so that these come first."""
    scratch: dict[Any, Any] = field(default_factory=dict)
    """Private to the platform: what its ops compute once a step and share between the layers of the group."""


class WriteKV(Protocol):
    """The call of `Ops.write_kv`. Only 8-bit caches come with scales, and only to platforms whose limits name them."""

    def __call__(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales = ...,
        /,
    ) -> None: ...


class RotateAndWriteKV(Protocol):
    """The call of `Ops.rotary_and_write_kv`; scales as in `WriteKV`."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cos: Tensor,
        sin: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        scales: KVScales = ...,
        /,
    ) -> Tensor: ...


class Attend(Protocol):
    """The call of `Ops.attention`; scales as in `WriteKV`."""

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        scale: float,
        window: int | None,
        softcap: float | None,
        scales: KVScales = ...,
        /,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How a router makes K experts and their weights out of E logits; scores are fp32."""

    top_k: int
    scoring: Literal["softmax", "top_k_softmax", "sigmoid"] = "softmax"
    """softmax: over all experts. top_k_softmax: over the chosen ones alone. sigmoid: each expert by itself."""
    renormalize: bool = False
    """Divide the chosen weights by their sum."""
    num_groups: int = 1
    """Neighbouring experts form groups of equal size; experts outside the `top_groups` best groups cannot be chosen."""
    top_groups: int = 1
    group_score: Literal["max", "top2_sum"] = "max"
    scale: float = 1.0
    """Multiplies the weights at the end."""


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A GGML block type: weights of a block, and its bytes as stored."""

    size: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """A stack of experts' weights: [E * rows, columns], or what a `pack` made of it."""

    data: Tensor
    kind: str | None
    """Block type; None: floating point."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockOps:
    """Products with weights that stay in the blocks of a GGUF. `kind` is a key of `formats`."""

    formats: Mapping[str, BlockFormat]
    row_multiple: int
    """A weight can stay if its number of rows divides by this."""
    pack: Callable[[Tensor, str], Tensor]
    """(stored uint8 [N, bytes of a row], kind) -> uint8 of as many bytes, in the order of the kernels."""
    rows: Callable[[Tensor, Tensor, str, int, torch.dtype], Tensor]
    """(ids [T] int64, packed, kind, I, dtype) -> those rows of the weight, dequantised [T, I]."""
    linear: Callable[[Tensor, Tensor, str, Tensor | None, torch.dtype], Tensor]
    """(x [T, I], packed, kind, bias [N] or None, dtype) -> [T, N] in dtype. x may be quantised on the way, row by row."""
    linear_parts: Callable[[Tensor, Sequence[tuple[Tensor, str]], Tensor | None, torch.dtype], Tensor] | None = None
    """(x [T, I], (packed, kind) of neighbouring rows, bias [N] or None, dtype) -> [T, N]: `linear` of each part, side by side.
    None: a weight whose parts have different types is dequantised when it is read."""
    moe: Callable[[Tensor, Tensor, Tensor, ExpertStack, ExpertStack], Tensor] | None = None
    """(x [T, N], ids [T, K], weights [T, K], gate_up, down) -> [T, N], as `Ops.moe` with experts of which at least one of
    the two stacks is in blocks. None: experts are dequantised when they are read."""
    encoders: Mapping[tuple[str, str], Callable[[Tensor, Tensor], bool]] = field(default_factory=dict)
    """(kind, rounding of a `quant_method.SupportsPlatformEncoders`) -> encoder: (plain rows [n, I] fp32, bf16 or fp16, uint8
    [n, bytes of a row] to fill) -> False where the numbers have no such blocks; the method then says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """The kernels of a platform. The platform fills the table once; layers call it. Shapes are exact, layouts row-major.

    T tokens, R rows, H query heads, K key/value heads, D head size, N output and I input features, V vocabulary.
    Experts: E of them, K chosen per token, N the hidden size, I the size of one expert.
    Optional entries are None when a platform has no fused form; layers then compose required ones.
    """

    embedding: Callable[[Tensor, Tensor], Tensor]
    """(ids [T] int64, weight [V, N], or what `pack` made of it) -> [T, N]."""
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    """(x [T, I], weight [N, I], or what `pack` made of it, bias [N] or None) -> [T, N] in x's dtype."""
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    """(x [..., N], weight [N], eps) -> [..., N]; the mean square is taken in fp32."""
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    """(q [T, H, D], k [T, K, D], cos [T, R], sin [T, R]) -> rotated q, k; rotate-half over the first 2R of D."""
    silu_and_mul: Callable[[Tensor], Tensor]
    """(x [T, 2N]: gate then up) -> silu(gate) * up [T, N]."""
    gelu_tanh_and_mul: Callable[[Tensor], Tensor]
    """(x [T, 2N]: gate then up) -> gelu_tanh(gate) * up [T, N]."""
    write_kv: WriteKV
    """(k [T, K, D], v [T, K, D'], k_cache [blocks, block_size, K, D], v_cache [.., K, D'], slot_mapping [T]): in place.
    D' is D, except with latent attention (DeepSeek), whose values are narrower. A cache of float8_e4m3fn takes k and v
    divided by their scales in fp32, rounded to nearest even; beyond +-448 the largest number, and a NaN stays a NaN."""
    attention: Attend
    """(q [T, H, D], k_cache, v_cache, metadata, scale, window or None, logit softcap or None) -> [T, H, D'].
    Causal; a window w lets position p see p - w + 1 .. p. This step's keys are already in the cache. What an 8-bit cache
    holds counts times its scale."""
    gather_rows: Callable[[Tensor, Tensor], Tensor]
    """(x [T, N], rows [M] int64) -> [M, N]."""
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None
    """(x, residual, weight, eps) -> (rms_norm(x + residual), x + residual)."""
    rotary_and_write_kv: RotateAndWriteKV | None = None
    """(q, k, v, cos, sin, k_cache, v_cache, slot_mapping): `rotary`, then `write_kv` of the rotated k and of v, bit for bit.
    -> rotated q [T, H, D]."""
    topk_router: Callable[[Tensor, Routing, Tensor | None, Tensor | None], tuple[Tensor, Tensor]] | None = None
    """(logits [T, E], rule, bias [E] fp32 or None, tap [T or more, K] or None) -> (weights [T, K] fp32, ids [T, K] int64).
    The bias counts for the choice, not for the weights. ids descend by the score that chose them: the router's order; of
    equal scores the lower id comes first.
    A tap is a caller's buffer of any integer dtype: its first T rows become the ids, the others keep what they hold.
    Required of platforms that run mixture-of-experts models, like `moe`."""
    moe: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """(x [T, N], ids [T, K] int64, weights [T, K] fp32, gate_up [E, 2I, N]: gate then up, down [E, N, I]) -> [T, N]:
    the sum over K of weight * down(silu(gate x) * up x), added up in fp32 in the order of ids. Experts that no token
    chose are not read. A stack may also be what `pack` made of each expert's matrix, one after the other."""

    beside: Callable[[int, Callable[[], Tensor], Callable[[], Tensor]], tuple[Tensor, Tensor]] | None = None
    """(tokens, one piece of work, another) -> what both give, to the bit as if done one after the other. A platform may do them
    at the same time: both read what was there before the call, and neither what the other makes. None: in their order."""
    rotary_angles: Callable[[Tensor, Tensor, float], tuple[Tensor, Tensor]] | None = None
    """(positions [T] int64, frequencies [R] fp32, factor) -> factor * cos and factor * sin of their products, fp32 [T, R]."""
    pack: Callable[[Tensor], Tensor] | None = None
    """(weight [N, I]) -> the same numbers in the order the platform's kernels read them, in any shape; may return the
    weight itself. `linear`, `embedding` and `head_logits` take the result. Called once per weight, when it is loaded."""
    unpack: Callable[[Tensor], Tensor] | None = None
    """Inverse of `pack`; there if `pack` is."""
    head_logits: Callable[[Tensor, Tensor], Tensor] | None = None
    """(hidden [M, N], weight [V, N], packed or not) -> fp32 [M, V]: `linear` without rounding the result to x's dtype."""

    draw: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """(logits [M, V] fp32, rows [D] int64 of them, temperature [D] fp32, top_k [D] int64, 0 for all, top_p [D] fp64, 1 for
    all, min_p [D] fp32, number [D] fp64 in [0, 1)) -> ids [D] int64. Each row: of its logits the top_k highest (of equal
    ones the lowest ids), of these the smallest set of most likely ones that reaches top_p, of these all that are at least
    min_p times as likely as the best; then the first in the order of ids whose cumulative probability among them exceeds
    the number. Rows have a finite highest logit and are drawn from without being changed."""
    uniforms: Callable[[Tensor, Tensor], Tensor] | None = None
    """(seeds [D] int64, the bits of uint64; output positions [D] int64) -> the numbers of `draw`, [D] fp64: 53 bits of
    Philox4x32-10 with the seed as key and the position as the lower half of a counter whose upper half is 0. The first word
    gives the upper 32 bits, the second the others."""
    penalties: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], None] | None = None
    """(logits [M, V] fp32, dense, places [P] int64, counts [P] fp32, settings [P] int64, repetition, frequency, presence [S]
    fp32), in place: the logit at each place of the flat logits, no place twice, is divided by its setting's repetition if it
    is positive, else multiplied by it; then loses its count times frequency, and presence where the count is not 0."""
    draw_allowed: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """(`draw`'s arguments, then masks [D, ceil(V / 32) * 4] uint8) -> ids [D] int64: as `draw` over logits in which every token
    i whose bit i % 8 of byte i // 8 is 0 is minus infinity. At temperature 0 the highest that is left, of equal ones the
    lowest id. -1 where nothing above minus infinity is left."""
    best: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """logits [M, V] fp32 -> (ids [M] int64 of the highest logit of each row, of equal ones the lowest, that logit [M]). A NaN
    counts as higher than all numbers."""
    scale: Callable[[Tensor, float], Tensor] | None = None
    """(x, factor) -> factor * x in x's dtype."""
    sigmoid: Callable[[Tensor], Tensor] | None = None
    """Of each element, in x's dtype; without it torch's, whose last bit depends on an element's place in the tensor."""
    tanh: Callable[[Tensor], Tensor] | None = None
    widen: Callable[[Tensor], Tensor] | None = None
    """x in fp32."""
    add_shared: Callable[[Tensor, Tensor, Tensor | None], Tensor] | None = None
    """(x [T, N], shared [T, N], gate [T, 1] or None) -> x + shared, or x + shared * sigmoid(gate), rounded to x's dtype after
    each operation."""
    blocks: BlockOps | None = None
    """Products with a GGUF's own blocks; without it they are dequantised when they are read."""


class Platform(Protocol):
    """A place to compute. One instance per engine, used from its worker thread only, except `limits`."""

    name: str
    device: torch.device
    ops: Ops

    def limits(self) -> PlatformLimits:
        """Facts as of now."""
        ...

    def memory_in_use(self) -> int:
        """Bytes of platform memory this process holds now (CPU: RSS)."""
        ...

    def synchronize(self) -> None:
        """Wait until all queued work is done (CPU: nothing)."""
        ...

    def step_context(self) -> Any:
        """A context manager around each step: inference mode, thread count, streams. Must restore what it changes."""
        ...

    def close(self) -> None:
        """Free what the platform itself holds."""
        ...


Made = TypeVar("Made", bound="Tensor | tuple[Tensor, ...]")
"""What recorded work returns."""
Made_co = TypeVar("Made_co", bound="Tensor | tuple[Tensor, ...]", covariant=True)


class Graph(Protocol[Made_co]):
    """Recorded work."""

    def replay(self) -> Made_co:
        """Do the work again, on what its input tensors hold now. -> what it returned when it was recorded, the same tensors
        with new values; they last until the next replay or recording."""
        ...


@runtime_checkable
class SupportsGraphs(Protocol):
    """A platform that can repeat a sequence of operations without Python between them.

    The work reads tensors that stay where they are, among them its input, and runs under `step_context`.
    """

    def record(self, work: Callable[[], Made]) -> tuple[Made, Graph[Made] | None]:
        """Do the work once. -> its result, and the graph; None where something in the work cannot be repeated, for example
        an operation that is not the platform's own."""
        ...


@runtime_checkable
class SupportsGraphSizes(Protocol):
    """Of a platform that `SupportsGraphs` and for which recording is slow: steps of other numbers of rows are filled up."""

    def graph_sizes(self, max_rows: int) -> Sequence[int]:
        """Numbers of rows, ascending up to `max_rows`, that are recorded before the first request. Recorded work must compute
        the same row with the same bits in each of them; an attention is recorded with the longest sequence there can be."""
        ...


class Fetch(Protocol):
    """Results on their way to the host."""

    def ready(self) -> bool:
        """Whether `wait` would return at once. Never waits."""
        ...

    def wait(self) -> tuple[Tensor, ...]:
        """Of the same shapes and dtypes, on CPU, the caller's own. Raises what the device reports."""
        ...


@runtime_checkable
class SupportsStaging(Protocol):
    """A platform whose device works on while the host goes on. Of others everything is there when an operation returns, or
    reading a tensor waits for it.

    Both are called under `step_context`, in order with the operations of the step.
    """

    def upload(self, arrays: Sequence[NDArray[Any]]) -> tuple[Tensor, ...]:
        """On the device, for what is queued from now on. The arrays may change as soon as this returns."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Fetch:
        """Begin to bring to the host what the work queued so far makes of these tensors. What is queued from now on neither
        waits for it nor spoils it."""
        ...


@runtime_checkable
class SupportsWorkspace(Protocol):
    """A platform that places large results in a buffer of its own, whose size is planned by running a model on shapes.

    Of other platforms only the results of ops are counted: what an op allocates inside is not in the memory plan.
    """

    def planning_ops(self) -> tuple[Ops, Callable[[], int]]:
        """A table whose ops allocate what those of `ops` allocate, and compute nothing; and a function that gives the most
        bytes of the buffer that they had in use at a time. Large weights and the KV cache are on the meta device then,
        all else is on CPU."""
        ...

    def reserve_workspace(self, num_bytes: int) -> None:
        """Called once before the first step. A step that needs more must still run."""
        ...

    def trim(self) -> None:
        """Give the buffer's pages and other free memory back; the next step takes what it needs. Called between steps."""
        ...
