"""Attention with mass, by kernels: the signature of ``h2o_core.attention`` and its results.

One query runs one kernel, which reads keys and values once, or two when few heads hold many slots. A chunk takes its
output from ``mx.fast`` and its mass from two kernels that keep no probability.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

import mlx.core as mx

from h2o_core import Mass
from h2o_metal._shapes import Bool, Float, Int32
from h2o_metal.kernel import THREADS, launch

WHOLE = 1024
"""Up to so many slots a head is one threadgroup's: then a decode step is one launch."""
PART = 256
"""Slots that a threadgroup has at least where a head is shared."""
BUSY = 32
"""Threadgroups that keep a GPU busy. These three are estimates: nothing has been measured on Metal."""

_SIDE = 64  # of a tile, see kernels/tile.metal
_THREADGROUP, _SELECTION = 32768, 2048  # bytes: all that a threadgroup has, and what finding the victim takes


def attend(
    q: Float[mx.array, "B Hq N D"],
    k: Float[mx.array, "B H C D"],
    v: Float[mx.array, "B H C Dv"],
    scale: float,
    decay: float = 1.0,
    mask: Bool[mx.array, "B _ N C"] | Literal["causal"] | None = None,
    lengths: Int32[mx.array, " B"] | None = None,
    sinks: Float[mx.array, " Hq"] | None = None,
) -> tuple[Float[mx.array, "B Hq N Dv"], Mass]:
    """Attend, and count the attention that each row received, as ``h2o_core.attend`` does.

    One query takes ``h2o_attend_one``, or ``h2o_attend_part`` and ``h2o_attend_merge``. A chunk, and a query whose
    heads don't fit into a threadgroup (``fits``), takes
    ``mx.fast.scaled_dot_product_attention``, whose arithmetic is mlx's, and for the mass ``h2o_softmax_rows`` and
    ``h2o_column_mass``, which multiply queries and keys anew: mlx returns no sums, and to keep the
    probabilities would take 4·Hq·N·C bytes.

    Args:
        q: Queries.
        k: Keys, of any strides.
        v: Values, of any strides; of width 0 if the mass alone is wanted.
        scale: Factor on the logits.
        decay: Factor per token on mass that is already there.
        mask: As ``h2o_core.attend`` takes it.
        lengths: Real queries of each sequence.
        sinks: Sink logits.

    Returns:
        The output in v's dtype, and the mass in float32.

    Raises:
        RuntimeError: There is neither Metal nor CUDA here.
    """
    if q.shape[2] == 1 and lengths is None and fits(q, k, v):
        return _attend_one(q, k, v, scale, None if isinstance(mask, str) else mask, sinks)
    return _chunk_output(q, k, v, scale, mask, sinks), _chunk_mass(q, k, scale, decay, mask, lengths, sinks)


class Heads(NamedTuple):
    """The sizes of a call of one token, and into how many parts a head's slots go."""

    batch: int
    n_heads: int
    group: int
    n_slots: int
    width: int
    value_width: int
    parts: int

    @property
    def state(self) -> tuple[int, int, int]:
        """Shape of what there is one of for each slot."""
        return (self.batch, self.n_heads, self.n_slots)

    @property
    def out(self) -> tuple[int, int, int, int]:
        """Shape of the output; at least 1 wide, for Metal binds no empty buffer."""
        return (self.batch, self.n_heads * self.group, 1, max(1, self.value_width))

    @property
    def logits(self) -> tuple[tuple[int, ...], mx.Dtype]:
        """Shape and dtype of the logits."""
        return ((*self.state, self.group), mx.float32)


def fits(q: mx.array, k: mx.array, v: mx.array) -> bool:
    """Say whether the kernels of one query take arrays of these sizes.

    A threadgroup holds the queries of a KV head, its output and a tile of probabilities in 32 KB: 16 query heads 256
    wide fit. Each value's column is a thread's.
    """
    group, width = q.shape[1] // k.shape[1], max(k.shape[3], v.shape[3])
    return group <= 32 and v.shape[3] <= THREADS and 4 * group * (width + 2 * 64 + 2) + _SELECTION <= _THREADGROUP


def heads_of(q: mx.array, k: mx.array, v: mx.array) -> Heads:
    """Take the sizes of a call of one token from its arrays, which fit."""
    batch, n_heads, n_slots, width = k.shape
    group, value_width = q.shape[1] // n_heads, v.shape[3]
    parts = 1
    if n_slots > WHOLE and batch * n_heads < BUSY:
        parts = min(-(-n_slots // PART), -(-BUSY // (batch * n_heads)))
    return Heads(batch, n_heads, group, n_slots, width, value_width, parts)


def template_of(heads: Heads, v: mx.array, with_sinks: bool) -> dict[str, int | bool | mx.Dtype]:
    """Make the constants that the kernels of one query share."""
    sizes = {"G": heads.group, "D": heads.width, "DV": heads.value_width}
    return {"T": v.dtype, **sizes, "SINKS": with_sinks}


def sinks_or_none(sinks: mx.array | None) -> mx.array:
    """Give the kernels sink logits to bind, where there are none as well."""
    return _no_sinks() if sinks is None else sinks


@lru_cache(maxsize=1)
def _no_sinks() -> mx.array:
    return mx.array([0.0], mx.float32)


@lru_cache(maxsize=64)
def numbers_of(scale: float, decay: float) -> mx.array:
    """Give the kernels scale and decay; decode asks for the same ones in every layer and step."""
    return mx.array([scale, decay], mx.float32)


def attend_parts(heads: Heads, inputs: Mapping[str, mx.array], v: mx.array) -> dict[str, mx.array]:
    """Run ``h2o_attend_part``: each part's sums, for a second kernel to merge."""
    names = ("q", "k", "v", "sinks", "positions", "numbers")
    per_head = (heads.batch * heads.n_heads, heads.parts, heads.group)
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {
        "part_sums": ((*per_head, max(1, heads.value_width)), mx.float32),
        "part_stats": ((*per_head, 2), mx.float32),
        "logits": heads.logits,
    }
    made = launch(
        "h2o_attend_part",
        {name: inputs[name] for name in names},
        outputs,
        template_of(heads, v, with_sinks=False),
        groups=(heads.parts, heads.batch * heads.n_heads),
    )
    return dict(zip(outputs, made, strict=True))


def _attend_one(
    q: mx.array, k: mx.array, v: mx.array, scale: float, mask: mx.array | None, sinks: mx.array | None
) -> tuple[mx.array, Mass]:
    heads = heads_of(q, k, v)
    visible = mx.zeros((1, 1, 1), mx.int32) if mask is None else mx.where(mask[:, :, 0], 0, -1).astype(mx.int32)
    inputs = {
        "q": q,
        "k": k,
        "v": v if heads.value_width else k,
        "sinks": sinks_or_none(sinks),
        # The kernel shows a slot whose position is not negative.
        "positions": mx.broadcast_to(visible, heads.state),
        "numbers": numbers_of(scale, 1.0),
    }
    outputs: dict[str, tuple[tuple[int, ...], mx.Dtype]] = {
        "out": (heads.out, v.dtype),
        "mass": (heads.state, mx.float32),
    }
    template = template_of(heads, v, sinks is not None)
    groups = (1, heads.batch * heads.n_heads)
    if heads.parts == 1:
        out, mass, _ = launch("h2o_attend_one", inputs, {**outputs, "logits": heads.logits}, template, groups)
    else:
        found = attend_parts(heads, inputs, v)
        rest = {name: inputs[name] for name in ("sinks", "positions")}
        template["PARTS"] = heads.parts
        out, mass = launch("h2o_attend_merge", {**found, **rest}, outputs, template, groups)
    return out[..., : heads.value_width], Mass(mass, mass)


def _chunk_output(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    mask: mx.array | Literal["causal"] | None,
    sinks: mx.array | None,
) -> mx.array:
    if v.shape[3] == 0:
        return mx.zeros((*q.shape[:3], 0), v.dtype)
    if isinstance(mask, mx.array) and mask.shape[1] > 1:
        mask = mx.repeat(mask, q.shape[1] // mask.shape[1], axis=1)
    if sinks is not None:
        sinks = sinks.astype(q.dtype)
    out: mx.array = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    return out.astype(v.dtype)


def _chunk_mass(
    q: mx.array,
    k: mx.array,
    scale: float,
    decay: float,
    mask: mx.array | Literal["causal"] | None,
    lengths: mx.array | None,
    sinks: mx.array | None,
) -> Mass:
    (batch, n_query_heads, n_queries, width), (_, n_heads, n_rows, _) = q.shape, k.shape
    shown = mx.ones((1, 1, 1, 1), mx.bool_)
    if isinstance(mask, mx.array):
        shown = mx.broadcast_to(mask, (batch, n_heads, n_queries, n_rows))
    inputs = {"q": q, "k": k, "mask": shown, "numbers": numbers_of(scale, decay)}
    template = {"D": width, "G": n_query_heads // n_heads}
    template["MASK"] = 2 if isinstance(mask, mx.array) else 1 if mask == "causal" else 0
    (rows,) = launch(
        "h2o_softmax_rows",
        {**inputs, "sinks": sinks_or_none(sinks)},
        {"rows": ((batch, n_query_heads, n_queries, 2), mx.float32)},
        {**template, "SINKS": sinks is not None},
        groups=(-(-n_queries // _SIDE), batch * n_query_heads),
    )
    if lengths is None:
        lengths = mx.full((batch,), n_queries, mx.int32)
    made = ((batch, n_heads, n_rows), mx.float32)
    decayed, total = launch(
        "h2o_column_mass",
        {**inputs, "rows": rows, "lengths": lengths.astype(mx.int32)},
        {"decayed": made, "total": made},
        template,
        groups=(-(-n_rows // _SIDE), batch * n_heads),
    )
    return Mass(decayed, total)
