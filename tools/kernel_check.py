"""Every kernel on a GPU against its reference on the CPU, and its time beside mlx's own attention.

    uv venv gpu && uv pip install --python gpu -e "packages/h2o-mlxlm[cuda13]"
    gpu/bin/python tools/kernel_check.py cuda

prints two Markdown tables for the README of h2o-metal, and ends with 1 where a kernel is off. ``metal`` does the same
on a Mac. Neither has been run yet; the tests run it at small sizes on the emulator.
"""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import mlx.core as mx
import mlx.nn as nn

import h2o_core
import h2o_rope
from h2o_core import H2OConfig, H2OState
from h2o_core.conformance import TOLERANCE
from h2o_metal import attention, eviction, kernel, rotation
from h2o_mlxlm.benchmarks.timing import WARM_UP, in_turns, summaries


class Head(NamedTuple):
    """What a check is done with: dtype of the rows, query heads to a KV head, widths, slots."""

    dtype: mx.Dtype
    group: int
    width: int
    value_width: int
    n_slots: int


class Plan(NamedTuple):
    """Sizes of the checks and of the timing; ``whole`` slots and ``part`` as in ``h2o_metal.attention``."""

    heads: list[Head]
    batch: int
    n_heads: int
    n_queries: int
    whole: int
    part: int
    timed: list[Head]


DTYPES = [mx.float32, mx.float16, mx.bfloat16]
WIDTHS = [(64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)]
SLOTS = [1, 33, 97, 1000, 8193]
FULL = Plan(
    heads=[Head(d, g, *w, n) for d in DTYPES for g, w in zip((1, 2, 4, 7, 8, 16), WIDTHS, strict=True) for n in SLOTS],
    batch=2,
    n_heads=3,
    n_queries=130,
    whole=attention.WHOLE,
    part=attention.PART,
    timed=[Head(mx.float16, 4, 128, 128, n) for n in (512, 1024, 4096, 8192)],
)
# Kernels of these constants are compiled for other tests as well. The second head is shared.
_TRIED = [Head(mx.float32, 2, 64, 64, n) for n in (9, 12)]
SMALL = Plan(_TRIED, batch=1, n_heads=1, n_queries=9, whole=9, part=4, timed=_TRIED[:1])

Pairs = list[tuple[mx.array, mx.array]]
"""Ours and the reference's: the same exactly where they are integers, else by the tolerance of their dtype."""


def normal(seed: int, *shape: int, dtype: mx.Dtype = mx.float32) -> mx.array:
    """Draw what is the same on every device."""
    with mx.stream(mx.cpu):
        drawn = mx.random.normal(shape, key=mx.random.key(seed)).astype(dtype)
        mx.eval(drawn)
    return drawn


def both(ours: Callable[..., Any], reference: Callable[..., Any], *arguments: Any) -> tuple[Any, Any]:
    """Call a kernel's function, and on the CPU the reference's, whose float32 is not rounded to TF32 there."""
    with mx.stream(mx.cpu):
        expected = reference(*arguments)
        mx.eval(expected)
    return ours(*arguments), expected


def rows(head: Head, plan: Plan, n_queries: int) -> tuple[mx.array, mx.array, mx.array, float, mx.array]:
    """Queries, keys, values, scale, sink logits."""
    q = 2 * normal(1, plan.batch, plan.n_heads * head.group, n_queries, head.width, dtype=head.dtype)
    k = normal(2, plan.batch, plan.n_heads, head.n_slots, head.width, dtype=head.dtype)
    v = normal(3, plan.batch, plan.n_heads, head.n_slots, head.value_width, dtype=head.dtype)
    return q, k, v, head.width**-0.5, normal(4, plan.n_heads * head.group)


def state_of(head: Head, plan: Plan, tied: bool = False) -> tuple[H2OConfig, H2OState]:
    """A state with random scores in random slots, one row above its budget; ``tied``: with few different scores."""
    shape = (plan.batch, plan.n_heads, head.n_slots)
    with mx.stream(mx.cpu):
        scores, totals = (mx.abs(normal(seed, *shape)) for seed in (5, 6))
        if tied:
            scores, totals = mx.floor(2 * scores), mx.floor(2 * totals)
        positions = mx.argsort(normal(7, *shape), axis=-1).astype(mx.int32)
        mx.eval(scores, totals, positions)
    budget = max(1, head.n_slots - 1)
    config = H2OConfig(budget=budget, n_sink=min(4, budget // 3), grace=min(16, budget // 3), long_share=0.4)
    return config, H2OState(scores, totals, positions, mx.full((plan.batch,), head.n_slots, mx.int32))


@contextlib.contextmanager
def shared(plan: Plan) -> Iterator[None]:
    """Share heads of more than ``plan.whole`` slots among threadgroups, in parts of at least ``plan.part``."""
    before = attention.WHOLE, attention.PART
    attention.WHOLE, attention.PART = plan.whole, plan.part
    try:
        yield
    finally:
        attention.WHOLE, attention.PART = before


def decode(head: Head, plan: Plan) -> Pairs:
    """h2o_decode, or with parts h2o_attend_part and h2o_decode_merge."""
    config, state = state_of(head, plan)
    ours, theirs = both(eviction.decode_step, h2o_core.decode_step, config, state, *rows(head, plan, 1))
    return [(ours[0], theirs[0]), *zip(ours[1][:4], theirs[1][:4], strict=True), (ours[2], theirs[2])]


def attend_one(head: Head, plan: Plan) -> Pairs:
    """h2o_attend_one, or with parts h2o_attend_part and h2o_attend_merge."""
    q, k, v, scale, sinks = rows(head, plan, 1)
    ours, theirs = both(attention.attend, h2o_core.attend, q, k, v, scale, 1.0, None, None, sinks)
    return [(ours[0], theirs[0]), *zip(ours[1], theirs[1], strict=True)]


def chunk(head: Head, plan: Plan) -> Pairs:
    """h2o_softmax_rows and h2o_column_mass; the output is mlx's own."""
    q, k, v, scale, sinks = rows(head, plan, min(plan.n_queries, head.n_slots))
    ours, theirs = both(attention.attend, h2o_core.attend, q, k, v[..., :0], scale, 0.9, "causal", None, sinks)
    return list(zip(ours[1], theirs[1], strict=True))


def select(head: Head, plan: Plan) -> Pairs:
    """h2o_victims and h2o_evict: the same state in, ties and all: the same slots out."""
    config, state = state_of(head, plan, tied=True)
    ours, theirs = both(eviction.evict, h2o_core.evict, config, state)
    one = both(eviction.victims, h2o_core.victims, config, state)
    return [one, (ours[1], theirs[1]), *zip(ours[0][:4], theirs[0][:4], strict=True)]


def rotate(head: Head, plan: Plan) -> Pairs:
    """h2o_rotate."""
    k, at = rows(head, plan, 1)[1], mx.arange(head.n_slots)
    rope = nn.RoPE(64, traditional=head.group % 2 == 1)
    return [
        both(rotation.rotate, h2o_rope.rotate, k, 7 * at, rope),
        both(rotation.rerotate, h2o_rope.rerotate, k, 7 * at, at, rope),
    ]


CHECKS = (decode, attend_one, chunk, select, rotate)


def part_of_tolerance(ours: mx.array, theirs: mx.array) -> float:
    """How far the two are apart, 1 being what `TOLERANCE` allows; infinite where they must be equal and are not."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return float("inf")
    if ours.dtype not in TOLERANCE:
        return 0.0 if mx.array_equal(ours, theirs) else float("inf")
    x, y = ours.astype(mx.float32), theirs.astype(mx.float32)
    gap = (mx.abs(x - y) / (1 + mx.maximum(mx.abs(x), mx.abs(y)))).max().item()
    return gap / TOLERANCE[ours.dtype] if gap == gap else float("inf")


def checked(plan: Plan) -> list[dict[str, Any]]:
    """Do every check: one row for each set of kernels that a check launched.

    Raises:
        RuntimeError: A kernel was launched by none.
    """
    found: dict[tuple[str, ...], list[float]] = {}
    for check, head in product(CHECKS, plan.heads):
        with shared(plan), kernel.launches() as ran:
            worst = max(part_of_tolerance(*pair) for pair in check(head, plan))
        found.setdefault(tuple(dict.fromkeys(ran)), []).append(worst)
    if left := set(kernel.TEXTS) - {name for names in found for name in names}:
        raise RuntimeError(f"no check launched {', '.join(sorted(left))}")
    return [{"kernels": names, "cases": len(each), "worst": max(each)} for names, each in found.items()]


def timed(head: Head, plan: Plan, n_turns: int) -> list[dict[str, Any]]:
    """Time a decode step and the mass of a chunk beside mlx's attention of the same rows, which gives no mass."""
    config, state = state_of(head, plan)
    fast, out = mx.fast.scaled_dot_product_attention, []
    for what, n in (("decode step", 1), ("chunk", min(plan.n_queries, head.n_slots))):
        q, k, v, scale, _ = rows(head, plan, n)
        step = (config, state, q, k, v, scale) if n == 1 else (q, k, v, scale, 1.0, "causal")
        steps: dict[str, Callable[[Any], object]] = {
            "mx.fast": lambda _, given=(q, k, v), scale=scale: mx.eval(fast(*given, scale=scale)),
            "kernels": lambda _, f=eviction.decode_step if n == 1 else attention.attend, step=step: mx.eval(f(*step)),
            "h2o_core": lambda _, f=h2o_core.decode_step if n == 1 else h2o_core.attend, step=step: mx.eval(f(*step)),
        }
        times = in_turns(steps, n_turns, lambda i: None, warm_up=min(n_turns, WARM_UP))
        out += [{"what": what, "slots": head.n_slots, **row} for row in summaries(times, "mx.fast")]
    return out


def report(lines: list[dict[str, Any]], times: list[dict[str, Any]]) -> str:
    """Write both tables."""
    text = ["| kernels | cases | largest difference, of what is allowed |", "| --- | --- | --- |"]
    text += [f"| {', '.join(line['kernels'])} | {line['cases']} | {line['worst']:.3f} |" for line in lines]
    text += ["", "| what | slots | by | median ms | of mx.fast's, in pairs |", "| --- | --- | --- | --- | --- |"]
    columns = ("what", "slots", "variant", "median_ms", "paired_ratio")
    text += ["| " + " | ".join(str(row[column]) for column in columns) + " |" for row in times]
    return "\n".join(text)


def main(arguments: list[str] | None = None) -> int:
    """Check and time; return 1 where a kernel is further off than allowed."""
    parser = argparse.ArgumentParser(description="Check every kernel on a GPU against its reference, and time it.")
    parser.add_argument("backend", choices=("metal", "cuda"))
    parser.add_argument(
        "--turns", type=int, default=200, help="times measured of each variant, at least 1 (default 200)"
    )
    parser.add_argument("--small", action="store_true", help="small sizes, to try the script itself")
    given = parser.parse_args(arguments)
    if given.turns < 1:
        parser.error(f"--turns is at least 1, got {given.turns}")
    try:
        kernel.require(given.backend)
    except RuntimeError as error:
        sys.exit(f"kernel_check: {error}")
    plan = SMALL if given.small else FULL
    lines = checked(plan)
    print(report(lines, [row for head in plan.timed for row in timed(head, plan, given.turns)]))
    return int(any(line["worst"] > 1 for line in lines))


if __name__ == "__main__":
    sys.exit(main())
