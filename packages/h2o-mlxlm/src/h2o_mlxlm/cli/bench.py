"""``h2o-mlxlm bench``: what a decode step costs, against mlx_lm's own cache, in one process.

Runs take turns (A B A B …), so that a machine that slows down slows all of them.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from importlib import metadata
from typing import Any

from h2o_core import H2OConfig
from h2o_mlxlm.cli import flags

BASELINE = "recency"


def add_to(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("bench", help="Time decode steps", description=__doc__)
    count = flags.number(1, 2**20, int)
    parser.add_argument("--budget", type=count, nargs="+", default=[256, 1024], help="Tokens kept (%(default)s)")
    parser.add_argument("--kv-heads", type=count, default=8, help="KV heads (%(default)s)")
    parser.add_argument("--group", type=count, default=3, help="Query heads of a KV head (%(default)s)")
    parser.add_argument("--head-dim", type=count, default=64, help="Width of keys and values (%(default)s)")
    parser.add_argument("--batch", type=count, default=1, help="Sequences (%(default)s)")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default="float32")
    parser.add_argument("--steps", type=count, default=200, help="Steps timed of each (%(default)s)")
    parser.add_argument("--json", action="store_true", help="Print one JSON object a line")
    parser.set_defaults(run=run, verbose=True)


def run(args: argparse.Namespace) -> int:
    """Time a full cache's decode step: write a row, attend, score, evict."""
    for budget in args.budget:
        rows = _measured(_steps(args, budget), args.steps)
        for row in rows:
            row |= _circumstances(args, budget)
            print(json.dumps(row) if args.json else _line(row))
    return 0


def _steps(args: argparse.Namespace, budget: int) -> dict[str, Callable[[], None]]:
    """A function for each variant that does one step and waits for it."""
    import mlx.core as mx
    import mlx.nn as nn
    from mlx_lm.models.cache import RotatingKVCache

    from h2o_mlxlm.attention import scaled_dot_product_attention
    from h2o_mlxlm.cache import H2OKVCache
    from h2o_rope import rotation_of

    dtype, scale = getattr(mx, args.dtype), args.head_dim**-0.5
    rotation = rotation_of(nn.RoPE(args.head_dim))
    caches = {
        BASELINE: RotatingKVCache(budget, keep=4),
        "original": H2OKVCache(H2OConfig(budget=budget, n_sink=0, grace=budget // 16)),
        "key queries": H2OKVCache(H2OConfig(budget=budget, n_sink=0, grace=budget // 16, queries="key")),
        "rolling": H2OKVCache(
            H2OConfig(budget=budget, n_sink=0, grace=budget // 16, positions="rolling"), rotation=rotation
        ),
    }

    def rows(heads: int, n: int) -> mx.array:
        return mx.random.normal((args.batch, heads, n, args.head_dim)).astype(dtype)

    def step(cache: Any, n: int) -> None:
        q, k = rows(args.kv_heads * args.group, n), rows(args.kv_heads, n)
        mx.eval(q, k)
        keys, values = cache.update_and_fetch(k, k)
        mask = "causal" if n > 1 else None
        mx.eval(scaled_dot_product_attention(q, keys, values, cache, scale, mask))

    for cache in caches.values():
        step(cache, budget)
        step(cache, 1)
    return {name: partial(step, cache, 1) for name, cache in caches.items()}


def _measured(variants: dict[str, Callable[[], None]], n_steps: int) -> list[dict[str, Any]]:
    """Time the variants in turns; ratios are of medians to the baseline's."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for i in range(n_steps + 10):
        for name, step in variants.items():
            start = time.perf_counter()
            step()
            if i >= 10:  # the first steps compile and allocate
                times[name].append(1e3 * (time.perf_counter() - start))
    baseline = statistics.median(times[BASELINE])
    return [_row(name, sorted(values), baseline) for name, values in times.items()]


def _row(name: str, values: list[float], baseline: float) -> dict[str, Any]:
    median = statistics.median(values)
    return {
        "variant": name,
        "median_ms": round(median, 4),
        "p10_ms": round(values[len(values) // 10], 4),
        "p90_ms": round(values[len(values) * 9 // 10], 4),
        "ratio": round(median / baseline, 3),
    }


def _circumstances(args: argparse.Namespace, budget: int) -> dict[str, Any]:
    import mlx.core as mx

    shape = {key: getattr(args, key) for key in ("kv_heads", "group", "head_dim", "batch", "dtype", "steps")}
    return {
        "budget": budget,
        **shape,
        "device": str(mx.default_device()),
        "machine": platform.platform(),
        "versions": {name: metadata.version(name) for name in ("mlx", "mlx-lm", "h2o-mlxlm")},
        "date": date.today().isoformat(),
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"budget {row['budget']:>5} {row['dtype']:<8} {row['variant']:<12} "
        f"{row['median_ms']:8.3f} ms ({row['p10_ms']:.3f} to {row['p90_ms']:.3f})  {row['ratio']:.2f} x {BASELINE}"
    )
