"""What one layer's H2O cache holds, what its prefill needs at most, and whether decoding leaves anything behind."""

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from h2o_mlxlm.benchmarks import layer
from h2o_mlxlm.benchmarks.layer import ITEM_BYTES, Shape
from h2o_mlxlm.benchmarks.variants import VARIANTS, Room
from h2o_mlxlm.circumstances import circumstances

KIB = 2**10
MIB = 2**20

STATE_ARRAYS = 32
"""Arrays of 4 bytes a slot that ending a call may hold at once: scores, positions, ranks, orders, conditions."""


def prefill_bound(shape: Shape, budget: int, chunk: int) -> int:
    """Bound the memory of prefill calls of ``chunk`` tokens: the cache, the call's own arrays, all that it makes.

    With R = budget + chunk rows in a call, and n = BLOCK_ELEMENTS / (B Hq R) queries a block (at least 1, at most
    chunk), the sum of

        call      q, k, v                                                     B (Hq + 2 H) chunk D items
        rows      K and V: old (budget + 1), packed (budget), joined (R), taken (budget), widened (budget + 1)
        wide      K and V of 16 bits again, for float32 arithmetic            R rows of float32
        queries   scaled; 16 bits: widened before; block by block once more   3 B Hq chunk D float32
        outputs   block by block in float32, in the dtype, joined             B Hq chunk D (float32 + 2 items)
        block     logits of one, before and after its mask, probabilities     3 B Hq n R float32
        masks     causal, while it is made                                    3 n R booleans
        state     STATE_ARRAYS arrays of B H R

    Nothing in it grows with the length of the prompt. One block is alive at a time, because ``attend`` ties each
    block to the one before.

    Args:
        shape: Of the layer.
        budget: Tokens kept.
        chunk: Tokens of a call.

    Returns:
        Bytes.
    """
    from h2o_core import attention

    item, d = ITEM_BYTES[shape.dtype], shape.head_dim
    query_heads = shape.batch * shape.kv_heads * shape.group
    rows = budget + chunk
    block = min(chunk, max(1, attention.BLOCK_ELEMENTS // (query_heads * rows)))
    parts = {
        "call": (query_heads * item + 2 * shape.batch * shape.kv_heads * item) * chunk * d,
        "rows": (4 * budget + 2 + rows) * shape.row_bytes,
        "wide": rows * shape.row_bytes * 4 // item if item < 4 else 0,
        "queries": 3 * 4 * query_heads * chunk * d,
        "outputs": (4 + 2 * item) * query_heads * chunk * d,
        "block": 3 * 4 * query_heads * block * rows,
        "masks": 3 * block * rows,
        "state": STATE_ARRAYS * 4 * shape.batch * shape.kv_heads * rows,
    }
    return sum(parts.values())


def prefill_peak(shape: Shape, budget: int, chunk: int, n_tokens: int) -> int:
    """Measure what ``prefill_bound`` bounds: the most memory in use, beyond what was before, over a prompt.

    Args:
        shape: Of the layer.
        budget: Tokens kept.
        chunk: Tokens of a call.
        n_tokens: Tokens of the prompt, a multiple of ``chunk``.

    Returns:
        Bytes.
    """
    import mlx.core as mx

    with _exact():
        before = _active()
        cache = VARIANTS["h2o"].make(Room(budget, shape.head_dim))[0]
        peak = 0
        for _ in range(0, n_tokens, chunk):
            given = layer.drawn(shape, chunk)
            mx.synchronize()
            mx.reset_peak_memory()
            out = layer.called(cache, given)
            # The end of a call is part of it: in a model it runs with the next layer.
            mx.eval(out, cache.state)
            peak = max(peak, mx.get_peak_memory() - before)
            del given, out
    return peak


def held(shape: Shape, budget: int, n_tokens: int, variant: str = "h2o") -> tuple[int, int]:
    """Compare what the process holds for a cache of ``n_tokens`` seen tokens with what the cache says.

    Returns:
        Bytes in use since before the cache was made, and its ``nbytes``.
    """
    with _exact():
        before = _active()
        cache = VARIANTS[variant].make(Room(budget, shape.head_dim))[0]
        layer.fill(cache, shape, n_tokens)
        return _active() - before, cache.nbytes


def level(shape: Shape, budget: int, n_steps: int, window: int) -> Iterator[tuple[int, int]]:
    """Decode from an empty cache on and report, after each window of steps, what is left behind.

    Yields:
        Steps so far, and the bytes in use since before the cache was made that are not the cache's ``nbytes``.
    """
    import mlx.core as mx

    with _exact():
        before = _active()
        cache = VARIANTS["h2o"].make(Room(budget, shape.head_dim))[0]
        for step in range(1, n_steps + 1):
            layer.call(cache, layer.drawn(shape, 1))
            if step % window == 0:
                mx.eval(cache.state)
                yield step, _active() - before - cache.nbytes


def measure(
    shape: Shape, budgets: Sequence[int], chunk: int, n_tokens: int, n_steps: int, window: int = 500
) -> Iterator[dict[str, Any]]:
    """Measure all three; a row's ``kind`` is ``held``, ``prefill`` or ``level``.

    Args:
        shape: Of the layer.
        budgets: Tokens kept.
        chunk: Prompt tokens a call.
        n_tokens: Tokens of the prompt.
        n_steps: Decode steps, once with each budget and once with one that is never reached.
        window: Steps between two looks at the memory.
    """
    common = asdict(shape) | circumstances()
    for budget in budgets:
        for phase, n in (("below", budget // 2), ("above", 2 * budget)):
            in_use, said = held(shape, budget, n)
            row = {"kind": "held", "budget": budget, "phase": phase, "tokens": n}
            yield row | {"held_kib": round(in_use / KIB, 1), "nbytes_kib": round(said / KIB, 1)} | common
        peak, bound = prefill_peak(shape, budget, chunk, n_tokens), prefill_bound(shape, budget, chunk)
        row = {"kind": "prefill", "budget": budget, "chunk": chunk, "tokens": n_tokens}
        row |= {"peak_mib": round(peak / MIB, 2), "bound_mib": round(bound / MIB, 2)}
        yield row | {"ratio": round(peak / bound, 3)} | common
        for phase, kept in (("below", budget + n_steps), ("above", budget)):
            for step, beyond in level(shape, kept, n_steps, window):
                row = {"kind": "level", "budget": kept, "phase": phase if step > budget else "below", "step": step}
                yield row | {"beyond_nbytes_kib": round(beyond / KIB, 2)} | common


@contextmanager
def _exact() -> Iterator[None]:
    """Let mlx give each array a buffer of its size: one that it uses again may be up to two pages larger."""
    import mlx.core as mx

    mx.clear_cache()
    limit = mx.set_cache_limit(0)
    try:
        yield
    finally:
        mx.set_cache_limit(limit)


def _active() -> int:
    import mlx.core as mx

    # Garbage that Python has yet to collect (tracing makes some) is not held for the cache.
    gc.collect()
    mx.synchronize()
    return mx.get_active_memory()
