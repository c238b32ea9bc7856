"""The reference attention: the output and, from the same softmax, the mass that each row received."""

from typing import Literal, NamedTuple

import mlx.core as mx

from h2o_core._shapes import Bool, Float, Float32, Int32

# Logits of one block of queries, over all sequences and heads: it bounds what prefill needs beside the cache, and is
# small enough for a CPU to keep at hand (2,048 tokens take half the time that they take with four times as many).
BLOCK_ELEMENTS = 1 << 20


class Mass(NamedTuple):
    """The attention that each row received in a call, averaged over the query heads of its KV head."""

    decayed: Float32[mx.array, "B H C"]  # an earlier query of the call counts less
    total: Float32[mx.array, "B H C"]  # all queries of the call count alike


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
    """Attend, and count the attention that each row received.

    p = softmax(q kᵀ · scale), out = p v, and

        total[b,h,c]   = Σ_i mean_g p[b,h,g,i,c]
        decayed[b,h,c] = Σ_i decay^(n−1−i) · mean_g p[b,h,g,i,c]

    with n the real queries of the sequence and g over the query heads of KV head h. Without sink logits each
    query adds exactly 1 to its head's total. All arithmetic is float32 whatever the dtype: in
    float16 a sum of probabilities stops growing at 2,048, and a CPU multiplies float32 faster. Queries go
    in blocks, and what lies above the diagonal is never computed.

    Args:
        q: Queries, Hq a multiple of H; query head h·G + g belongs to KV head h.
        k: Keys of all slots.
        v: Values of all slots; of width 0 if the mass alone is wanted.
        scale: Factor on the logits.
        decay: Factor per token on mass that is already there, in (0, 1].
        mask: None: every row is visible (a single query). ``"causal"``: the last N rows are the queries'
            own tokens, in order, and all before them are visible. An array: True where visible.
        lengths: Real queries of each sequence; the rest is padding on the right and gives no mass.
        sinks: One logit per query head that joins the softmax and takes mass to nowhere (gpt-oss).

    Returns:
        The output in v's dtype, and the mass.

    Source:
        H2O (arXiv 2306.14048), section 4: the score of a token is the sum of the attention it receives.
    """
    batch, n_query_heads, n_queries, _ = q.shape
    n_heads, n_rows = k.shape[1], k.shape[2]
    if n_queries == 1 and lengths is None:
        return _attend_one(q, k, v, scale, None if isinstance(mask, str) else mask, sinks)
    grouped = (q.astype(mx.float32) * scale).reshape(batch, n_heads, -1, n_queries, q.shape[-1])
    keys, values = k.astype(mx.float32).swapaxes(-1, -2), v.astype(mx.float32)
    weights = decay_weights(n_queries, (decay, 1.0), lengths) * (n_heads / n_query_heads)
    block = max(1, BLOCK_ELEMENTS // (batch * n_query_heads * n_rows))
    outs: list[mx.array] = []
    mass = mx.zeros((batch, n_heads, 2, n_rows), mx.float32)
    for start in range(0, n_queries, block):
        stop = min(start + block, n_queries)
        # Under the causal rule this block sees nothing right of its last query's own row.
        shown = n_rows - (n_queries - stop if isinstance(mask, str) else 0)
        # The group's queries are rows of one product: its keys and values are read once.
        rows = grouped[..., start:stop, :].flatten(2, 3)
        if outs:
            # One block at a time: its probabilities are gone before the next one's are made.
            rows = mx.depends([rows], [mass, outs[-1]])[0]
        logits = mx.unflatten(rows @ keys[..., :shown], 2, (-1, stop - start))
        p = masked_softmax(logits, block_mask(mask, start, stop, shown), sinks).flatten(2, 3)
        part = mx.unflatten(p @ values[..., :shown, :], 2, (-1, stop - start))
        outs.append(part.astype(v.dtype))
        mass = mass + _widened(weighted(p, weights[..., start:stop]), n_rows)
    out = outs[0] if len(outs) == 1 else mx.concatenate(outs, axis=-2)
    return out.reshape(batch, n_query_heads, n_queries, v.shape[-1]), Mass(mass[:, :, 0], mass[:, :, 1])


def _attend_one(
    q: Float[mx.array, "B Hq 1 D"],
    k: Float[mx.array, "B H C D"],
    v: Float[mx.array, "B H C Dv"],
    scale: float,
    mask: Bool[mx.array, "B _ 1 C"] | None,
    sinks: Float[mx.array, " Hq"] | None,
) -> tuple[Float[mx.array, "B Hq 1 Dv"], Mass]:
    """The same for one query, in as few operations as it takes: in decode starting them is much of the cost."""
    batch, n_query_heads, _, width = q.shape
    rows = (q.astype(mx.float32) * scale).reshape(batch, k.shape[1], -1, width)
    keys = k.astype(mx.float32)
    if rows.shape[2] == 1:
        # Rows of keys times a vector, which a CPU does in half the time of the vector times columns.
        logits = (keys @ rows.swapaxes(-1, -2)).swapaxes(-1, -2)
    else:
        logits = rows @ keys.swapaxes(-1, -2)
    if mask is None and sinks is None:
        p = mx.softmax(logits, axis=-1)
    else:
        p = masked_softmax(logits[..., None, :], None if mask is None else mask[:, :, None], sinks).flatten(2, 3)
    mass = p.mean(axis=2) if rows.shape[2] > 1 else p.squeeze(2)
    # Values of width 0 are not worth starting a product for.
    out = p @ v.astype(mx.float32) if v.shape[-1] else mx.zeros((*p.shape[:3], 0))
    return out.astype(v.dtype).reshape(batch, n_query_heads, 1, v.shape[-1]), Mass(mass, mass)


def weighted(p: Float32[mx.array, "B H GN C"], weights: Float32[mx.array, "_ S N"]) -> Float32[mx.array, "B H S C"]:
    """The sums over queries and group, one for each row of weights."""
    group = p.shape[2] // weights.shape[-1]
    each = mx.tile(weights, (1, 1, group))[:, None]
    # A product with one number is no matrix product, and far from free as one.
    return each @ p if p.shape[2] > 1 else each * p


def _widened(mass: Float32[mx.array, "B H S C"], n_rows: int) -> Float32[mx.array, "B H S N"]:
    """The mass of a block that saw the first so many rows."""
    missing = n_rows - mass.shape[-1]
    return mx.pad(mass, [(0, 0), (0, 0), (0, 0), (0, missing)]) if missing else mass


def decay_weights(
    n_queries: int, decays: tuple[float, ...], lengths: Int32[mx.array, " B"] | None
) -> Float32[mx.array, "_ S N"]:
    """decay^(n−1−i) for each decay, 0 for padding. [1, S, N] without lengths."""
    index = mx.arange(n_queries)
    age = (n_queries if lengths is None else lengths[:, None, None]) - 1 - index
    age = age if lengths is not None else age[None, None]
    base = mx.array(decays, mx.float32)[:, None]
    return mx.where(age >= 0, mx.power(base, mx.maximum(age, 0).astype(mx.float32)), 0.0)


def block_mask(mask: mx.array | str | None, start: int, stop: int, shown: int) -> Bool[mx.array, "..."] | None:
    """The mask of one block, shaped to broadcast over [B, H, G, block, shown]."""
    if mask is None:
        return None
    if isinstance(mask, str):
        # Row of query i: the chunk's rows end at ``shown`` for the block's last query.
        own = mx.arange(shown - (stop - start), shown)
        return mx.arange(shown) <= own[:, None]
    return mask[:, :, None, start:stop]


def masked_softmax(
    logits: Float32[mx.array, "B H G N C"],
    mask: Bool[mx.array, "..."] | None,
    sinks: Float[mx.array, " Hq"] | None,
) -> Float32[mx.array, "B H G N C"]:
    """Softmax over the rows that a query may see, and over its sink logit, whose share is left out."""
    if mask is not None:
        logits = mx.where(mask, logits, -mx.inf)
    if sinks is None:
        return mx.softmax(logits, axis=-1)
    batch, n_heads, group, n_queries, _ = logits.shape
    extra = mx.broadcast_to(
        sinks.astype(mx.float32).reshape(1, n_heads, group, 1, 1), (batch, n_heads, group, n_queries, 1)
    )
    return mx.softmax(mx.concatenate([logits, extra], axis=-1), axis=-1)[..., :-1]
