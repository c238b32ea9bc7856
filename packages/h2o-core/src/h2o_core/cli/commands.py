"""What ``h2o-sim`` does: run, compare, generate."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from h2o_core.cli import inputs, texts
from h2o_core.config import H2OConfig
from h2o_core.scorer import scorer_names

if TYPE_CHECKING:
    from h2o_core.simulation import Trace
    from h2o_core.summaries import Summary

_HEADS = ("retained", "best", "overlap", "age", "frozen", "evictions")


class Replay(NamedTuple):
    """A configuration, and what its replay came to."""

    name: str
    config: H2OConfig
    trace: "Trace"
    summary: "Summary"


def run(args: argparse.Namespace) -> int:
    """Replay attention through one cache."""
    import mlx.core as mx

    config, attention = inputs.config_from(args), inputs.read_attention(args)
    replay = _replayed(config.scorer.name, config, attention)
    trace = replay.trace
    if args.out is not None:
        if not args.out.endswith(".safetensors"):
            raise ValueError(f"--out is a file that ends in .safetensors, got {args.out}")
        try:
            mx.save_safetensors(args.out, {name: x for name, x in trace._asdict().items() if isinstance(x, mx.array)})
        except RuntimeError as error:
            raise ValueError(f"{args.out} can't be written: {error}") from error
    if args.json:
        print(json.dumps({"steps": trace.retained.shape[-2], **_told(replay), "kept": _last_kept(trace)}))
    else:
        print(table([replay]))
    return 0


def compare(args: argparse.Namespace) -> int:
    """Replay attention through several caches."""
    configs = {} if args.scorers and not args.config else texts.configs_from(args.config, args.budget)
    if args.plot is not None:
        from h2o_core.cli.plot import check

        check(args.plot)
    attention = inputs.read_attention(args)
    if args.scorers:
        configs |= _fed(texts.configs_from(scorer_names(), args.budget), attention)
    replays = [_replayed(name, config, attention) for name, config in configs.items()]
    if args.plot is not None:
        from h2o_core.cli.plot import draw

        draw(args.plot, {replay.name: replay.trace for replay in replays})
    if args.json:
        results = [_told(replay) for replay in replays]
        print(json.dumps({"steps": attention.rows.shape[-1], "results": results}))
    else:
        print(table(replays))
    return 0


def generate(args: argparse.Namespace) -> int:
    """Make attention up and write it, what was planted beside it."""
    from h2o_core.rows import Recording
    from h2o_core.traces import write_trace

    made = inputs.make(args.kind, args)
    truth = [heavy._asdict() for heavy in made.truth]
    about = {"kind": args.kind, "seed": str(args.seed), "truth": json.dumps(truth)}
    write_trace(args.out, Recording(attention=made.attention.whole()), about)
    if args.json:
        print(json.dumps({"out": args.out, "shape": list(made.attention.shape), "truth": truth}))
    else:
        print(f"{args.out}: {args.kind}, {args.heads} heads, {args.steps} steps, {len(truth)} tokens planted")
    return 0


def table(replays: Sequence[Replay]) -> str:
    """Lay out one line a replay, means over sequences and heads."""
    rows = [["", *_HEADS]]
    for replay in replays:
        told = _told(replay)
        rows.append([replay.name, *(_short(told[head]) for head in _HEADS)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def _short(value: float | None) -> str:
    if value is None or isinstance(value, int):
        return "-" if value is None else str(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"


def _replayed(name: str, config: H2OConfig, attention: inputs.Attention) -> Replay:
    from h2o_core.simulation import simulate
    from h2o_core.summaries import summarize

    rows, n_kv_heads, prompt_len, chunk, recorded, _ = attention
    blocks = inputs.counted(rows, name)
    # A number of rows that no trace has is known before it is read.
    if not 1 <= prompt_len <= rows.shape[-1]:
        raise ValueError(
            f"--prompt-len must be between 1 and the {rows.shape[-1]} steps of the trace, got {prompt_len}"
        )
    found = inputs.inputs_for(config.scorer, attention)
    trace = simulate(blocks, config, prompt_len, n_kv_heads, chunk=chunk, inputs=found, recorded=recorded)
    return Replay(name, config, trace, summarize(trace, rows, start=prompt_len % rows.shape[-1]))


def _fed(configs: dict[str, H2OConfig], attention: inputs.Attention) -> dict[str, H2OConfig]:
    """The configurations whose scorer gets what it needs of the trace; of each of the others a line of why not."""
    from h2o_core.showing import check

    fed = {}
    for name, config in configs.items():
        try:
            check(config.scorer, attention.recorded, inputs.inputs_for(config.scorer, attention))
        except ValueError as error:
            print(f"left out: {error}", file=sys.stderr)
        else:
            fed[name] = config
    return fed


def _told(replay: Replay) -> dict[str, Any]:
    """A replay in plain numbers; None where there is no kept set to speak of."""
    numbers = {name: _number(x) for name, x in replay.summary._asdict().items()}
    seen, held = replay.trace.retained.shape[-2], (replay.trace.state.positions >= 0).sum(axis=-1).max()
    return {
        "name": replay.name,
        "config": asdict(replay.config),
        **numbers,
        "evictions": seen - int(_number(held) or 0),
    }


def _number(x: Any) -> float | None:
    value = float(x.mean().item())
    return None if value != value else value


def _last_kept(trace: "Trace") -> Any:
    """Positions kept in the end, a list for each head (of each sequence)."""

    def held(x: Any) -> Any:
        return [held(y) for y in x] if isinstance(x[0], list) else [p for p in x if p >= 0]

    return None if trace.kept is None else held(trace.kept[..., -1, :, :].tolist())
