"""``h2o-mlxlm bench LEVEL``: what a cache costs, against mlx_lm's own caches, in one process.

Runs take turns (A B A B …), so that a machine that slows down slows all of them.
"""

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from h2o_mlxlm.benchmarks.layer import Shape
from h2o_mlxlm.benchmarks.rows import append
from h2o_mlxlm.benchmarks.variants import VARIANTS, Variant, chosen
from h2o_mlxlm.cli import flags

Row = dict[str, Any]
_COUNT = flags.number(1, 2**20, int)
_MODEL_METHODS = ["full", "recency", "h2o"]


def add_to(commands: Any) -> None:
    """Add the command, its levels and their flags."""
    parser = commands.add_parser("bench", help="Measure time and memory", description=__doc__)
    levels = parser.add_subparsers(required=True, metavar="LEVEL")

    def level(name: str, what: str, *parts: Callable[[], argparse.ArgumentParser], **defaults: Any) -> Any:
        # Made anew for each level: parents share their actions, and with them their defaults.
        parents = [part() for part in (_common, *parts)]
        added = levels.add_parser(name, help=what, description=what, parents=parents)
        added.set_defaults(
            run=run, verbose=True, measured=_MEASURED[name], line=_LINES.get(name, _plain_line), **defaults
        )
        return partial(_add, added)

    add = level("step", "Time one layer's decode step", _methods, _baseline, _layer, baseline="recency")
    add("--budget", 256, 1024, nargs="+", help="Tokens kept")
    add("--context", help="Rows that unbounded caches hold (4 times the budget)")
    add("--steps", 200, help="Steps timed of each")
    add = level("prefill", "Time a model's prompts", _methods, _baseline, _model, methods=_MODEL_METHODS)
    add("--budget", 256, 1024, nargs="+", help="Tokens kept")
    add("--prompt", 512, 2048, nargs="+", help="Tokens of the prompt")
    add("--repeats", 5, help="Prompts timed of each")
    add = level("model", "Time a model's decode steps", _methods, _baseline, _model, methods=_MODEL_METHODS)
    _add_decode(add, steps=100)
    add = level("batch", "Time a model's decode steps in batches", _methods, _baseline, _model, methods=_MODEL_METHODS)
    _add_decode(add, steps=50)
    add("--batch", 1, 2, 4, 8, 16, nargs="+", help="Sequences")
    add = level("long", "Time many tokens through one set of caches", _methods, _model, methods=["h2o"])
    add("--budget", 512, 16384, nargs="+", help="Tokens kept")
    add("--tokens", 10000, help="Tokens generated")
    add("--window", 500, help="Tokens of a window")
    add = level("memory", "Measure what our cache holds and needs", _layer)
    add("--budget", 256, nargs="+", help="Tokens kept")
    add("--prompt", 4096, help="Tokens of the prompt")
    add("--chunk", 512, help="Prompt tokens a call")
    add("--steps", 1500, help="Decode steps")
    add("--window", 500, help="Steps between two looks at the memory")
    add = level("slopes", "Fit a step's cost against budget, batch and heads", _methods, _layer)
    add("--budget", 256, 512, 1024, 2048, nargs="+", help="Tokens kept")
    add("--batches", 1, 2, 4, nargs="+", help="Sequences")
    add("--heads", 2, 4, 8, nargs="+", help="KV heads")
    add("--steps", 50, help="Steps timed for each median")


def run(args: argparse.Namespace) -> int:
    """Measure a level: print each row as it comes, then append all to the file."""
    rows: list[Row] = []
    if args.out is not None:
        append(args.out, [])
    try:
        for row in args.measured(args):
            rows.append(row)
            print(json.dumps(row) if args.json else args.line(row), flush=True)
    finally:
        if args.out is not None:
            append(args.out, rows)
    return 0


def _add(parser: argparse.ArgumentParser, flag: str, *default: int, help: str, nargs: str | None = None) -> None:
    """Add a flag that takes a count, or several, and says its default."""
    value = None if not default else list(default) if nargs else default[0]
    text = help if value is None else f"{help} (%(default)s)"
    parser.add_argument(flag, type=_COUNT, nargs=nargs, default=value, help=text)


def _add_decode(add: Callable[..., None], steps: int) -> None:
    add("--budget", 256, nargs="+", help="Tokens kept")
    add("--context", 1024, help="Tokens of the prompt")
    add("--steps", steps, help="Steps timed of each")


def _common() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--json", action="store_true", help="Print one JSON object a line")
    parser.add_argument("--out", type=Path, metavar="FILE.csv", help="Append the rows to this file")
    return parser


def _methods() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    names = list(VARIANTS)
    parser.add_argument("--methods", nargs="+", choices=names, help="Caches to compare")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="Another cache, a callable(budget) -> cache; may be repeated",
    )
    return parser


def _baseline() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--baseline", default="full", help="The method that ratios refer to (%(default)s)")
    return parser


def _layer() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    d, add = Shape(), partial(_add, parser)
    add("--kv-heads", d.kv_heads, help="KV heads")
    add("--group", d.group, help="Query heads of a KV head")
    add("--head-dim", d.head_dim, help="Width of keys and values")
    add("--batch", d.batch, help="Sequences")
    parser.add_argument("--dtype", choices=["float32", "float16", "bfloat16"], default=d.dtype)
    return parser


def _model() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--model", help="Hub id, folder or .gguf file; the installed small model if not given")
    parser.add_argument(
        "--random",
        type=_sizes,
        metavar="LAYERS,HIDDEN,HEADS,KV",
        help="A Llama with random weights instead",
    )
    parser.add_argument(
        "--dtype",
        choices=["float32", "float16", "bfloat16"],
        default="float32",
        help="Of the random model (%(default)s)",
    )
    _add(parser, "--prefill-step-size", 2048, help="Prompt tokens a call")
    return parser


def _sizes(text: str) -> list[int]:
    try:
        sizes = [_COUNT(part) for part in text.split(",")]
    except argparse.ArgumentTypeError:
        sizes = []
    if len(sizes) != 4:
        raise argparse.ArgumentTypeError(f"must be LAYERS,HIDDEN,HEADS,KV such as 4,256,8,2, got {text!r}")
    return sizes


def _shape(args: argparse.Namespace) -> Shape:
    return Shape(args.kv_heads, args.group, args.head_dim, args.batch, args.dtype)


def _with_model(args: argparse.Namespace) -> tuple[dict[str, Variant], Any]:
    from h2o_mlxlm.benchmarks.workload import head_dim_of, model_for

    model = model_for(args.model, args.random, args.dtype)
    baseline = getattr(args, "baseline", None)
    return chosen(args.methods, args.against, head_dim_of(model), baseline), model


def _step(args: argparse.Namespace) -> Iterator[Row]:
    from h2o_mlxlm.benchmarks import step

    variants = chosen(args.methods, args.against, args.head_dim, args.baseline)
    return step.measure(variants, _shape(args), args.budget, args.steps, args.baseline, args.context)


def _prefill(args: argparse.Namespace) -> Iterator[Row]:
    from h2o_mlxlm.benchmarks import prefill

    variants, loaded = _with_model(args)
    given = args.budget, args.prompt, args.repeats, args.baseline, args.prefill_step_size
    return prefill.measure(variants, loaded, *given)


def _decode(args: argparse.Namespace) -> Iterator[Row]:
    from h2o_mlxlm.benchmarks import model

    variants, loaded = _with_model(args)
    batches = getattr(args, "batch", [1])
    given = args.budget, batches, args.context, args.steps, args.baseline, args.prefill_step_size
    return model.measure(variants, loaded, *given)


def _long(args: argparse.Namespace) -> Iterator[Row]:
    from h2o_mlxlm.benchmarks import long

    return long.measure(*_with_model(args), args.budget, args.tokens, args.window)


def _memory(args: argparse.Namespace) -> Iterator[Row]:
    from h2o_mlxlm.benchmarks import memory

    return memory.measure(_shape(args), args.budget, args.chunk, args.prompt, args.steps, args.window)


def _slopes(args: argparse.Namespace) -> Iterator[Row]:
    from h2o_mlxlm.benchmarks import slopes

    variants = chosen(args.methods, args.against, args.head_dim)
    return slopes.measure(variants, _shape(args), args.budget, args.batches, args.heads, args.steps)


def _times(row: Row) -> str:
    return (
        f"{row['variant']:<12} {row['median_ms']:8.3f} ms ({row['p10_ms']:.3f} to {row['p90_ms']:.3f})  "
        f"{row['ratio']:.2f} x {row['baseline']}, paired {row['paired_ratio']:.2f} "
        f"({row['paired_q1']:.2f} to {row['paired_q3']:.2f})"
    )


def _step_line(row: Row) -> str:
    return f"budget {row['budget']:>5} {row['dtype']:<8} {_times(row)}"


def _prefill_line(row: Row) -> str:
    return f"prompt {row['prompt']:>5} budget {row['budget']:>5} {_times(row)}  peak {row['peak_mib']:.1f} MiB"


def _decode_line(row: Row) -> str:
    return f"budget {row['budget']:>5} batch {row['batch']:>2} {_times(row)}  {row['tokens_per_s']:.1f} tokens/s"


def _plain_line(row: Row) -> str:
    """All that was measured, without where."""
    left_out = ("device", "chip", "machine", "versions", "date")
    return "  ".join(f"{name} {value}" for name, value in row.items() if name not in left_out)


_MEASURED: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "step": _step,
    "prefill": _prefill,
    "model": _decode,
    "batch": _decode,
    "long": _long,
    "memory": _memory,
    "slopes": _slopes,
}
_LINES: dict[str, Callable[[Row], str]] = {
    "step": _step_line,
    "prefill": _prefill_line,
    "model": _decode_line,
    "batch": _decode_line,
}
