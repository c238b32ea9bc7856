"""One attention layer without a model: random queries, keys and values for one cache."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx

FILL = 256
"""Tokens of a call that fills a cache: the logits of a call stay small beside the cache."""

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class Shape:
    """B sequences, H = ``kv_heads`` KV heads, Hq = H · ``group`` query heads, D = Dv = ``head_dim``."""

    kv_heads: int = 8
    group: int = 3
    head_dim: int = 64
    batch: int = 1
    dtype: str = "float32"

    @property
    def row_bytes(self) -> int:
        """Bytes of one token's key and value, over all sequences and heads."""
        return 2 * self.batch * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]


def drawn(shape: Shape, n: int) -> "list[mx.array]":
    """Draw queries [B, Hq, n, D], keys [B, H, n, D] and values likewise, evaluated."""
    import mlx.core as mx

    heads = (shape.kv_heads * shape.group, shape.kv_heads, shape.kv_heads)
    given = [mx.random.normal((shape.batch, h, n, shape.head_dim)).astype(getattr(mx, shape.dtype)) for h in heads]
    mx.eval(given)
    return given


def called(cache: Any, given: "list[mx.array]") -> "mx.array":
    """Build one call of the layer, nothing evaluated: write the rows, attend, let the cache score and evict."""
    from h2o_mlxlm.attention import scaled_dot_product_attention

    q, k, v = given
    keys, values = cache.update_and_fetch(k, v)
    mask = "causal" if q.shape[2] > 1 else None
    return scaled_dot_product_attention(q, keys, values, cache, q.shape[-1] ** -0.5, mask)


def call(cache: Any, given: "list[mx.array]") -> None:
    """Do one call of the layer and wait for it."""
    import mlx.core as mx

    mx.eval(called(cache, given))


def fill(cache: Any, shape: Shape, n_tokens: int, attend: bool = True) -> None:
    """Put so many tokens into a cache, in calls of at most ``FILL``.

    Args:
        cache: One layer's cache.
        shape: Of its rows.
        n_tokens: At least 0.
        attend: False writes the rows and no more, for caches that score nothing.
    """
    import mlx.core as mx

    for start in range(0, n_tokens, FILL):
        given = drawn(shape, min(FILL, n_tokens - start))
        if attend:
            call(cache, given)
        else:
            cache.update_and_fetch(*given[1:])
        # What a call leaves behind is due in the next one: without this the last call's stays pending.
        mx.eval(cache.state)
