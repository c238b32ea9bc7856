"""What a command works on: attention from a file or made up, and the caches to replay it through.

mlx loads when the attention is read, so that help and bad flags are answered at once.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from h2o_core.config import H2OConfig
from h2o_core.scorer import Scorer, scorer_from

if TYPE_CHECKING:
    from h2o_core.generators import Planted
    from h2o_core.rows import Recording, Rows

KINDS = ("zipf", "shift", "needles", "recency", "uniform")
"""What ``h2o_core.generators`` makes."""

_SECONDS = 0.2  # between two looks at the counter


class Attention(NamedTuple):
    """What is replayed, and how."""

    rows: "Rows"
    n_kv_heads: int | None
    prompt_len: int
    chunk: int
    recorded: "Recording | None" = None  # with what some scorers need
    given: "dict[str, Any] | None" = None  # the inputs of scorers, from a file


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Add the attention, and the flags that say how it is replayed."""
    add = parser.add_argument
    add("attention", metavar="FILE|KIND", help=f"A trace, or what to make up: {', '.join(KINDS)}")
    add("--layer", type=int, help="Which layer of the trace, if it has several")
    add("--kv-heads", type=int, help="KV heads (the trace's; else one for each query head)")
    add("--prompt-len", type=int, default=1, help="Rows of the first call (%(default)s)")
    add("--chunk", type=int, default=1, help="Rows of each call after it (%(default)s)")
    add("--inputs", metavar="FILE.safetensors", help="What scorers need of the caller, by name, such as reconstruction")
    add_made(parser)


def add_made(parser: argparse.ArgumentParser) -> None:
    """Add the flags of attention that is made up."""
    add = parser.add_argument_group("attention that is made up").add_argument
    add("--steps", type=int, default=1024, help="Tokens (%(default)s)")
    add("--heads", type=int, default=4, help="Query heads (%(default)s)")
    add("--seed", type=int, default=0, help="Of positions and noise (%(default)s)")


def add_config(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make one ``H2OConfig``."""
    d, group = H2OConfig(), parser.add_argument_group("cache")

    def add(flag: str, **kwargs: Any) -> None:
        # Only what is asked for: a default may depend on the budget.
        group.add_argument(flag, default=argparse.SUPPRESS, **kwargs)

    add("--budget", type=int, help=f"Tokens kept per KV head ({d.budget})")
    add("--n-sink", type=int, help=f"Leading tokens never evicted ({d.n_sink})")
    add("--grace", type=int, help=f"Newest tokens never evicted ({d.grace} of {d.budget})")
    add("--decay", type=float, help=f"Factor on scores per token, in (0, 1] ({d.decay})")
    add("--scorer", help="What scores, with parameters: 'snapkv window=16' (h2o)")
    add("--long-share", type=float, help=f"Share of places for old sums ({d.long_share})")
    add("--no-evict-during-prefill", dest="evict_during_prefill", action="store_false", help="Hold the whole prompt")


def config_from(args: argparse.Namespace) -> H2OConfig:
    """Make the configuration that ``add_config``'s flags ask for."""
    fields = {name: value for name, value in vars(args).items() if name in H2OConfig.__dataclass_fields__}
    if "scorer" in fields:
        fields["scorer"] = scorer_from(fields["scorer"])
    return H2OConfig(**fields)


def read_attention(args: argparse.Namespace) -> Attention:
    """Read the trace that the flags name, or make it up."""
    given = _given(args.inputs)
    if args.attention in KINDS:
        if args.layer is not None:
            raise ValueError(f"--layer is for a trace in a file, got {args.attention}")
        rows = make(args.attention, args).attention
        return Attention(rows, args.kv_heads, args.prompt_len, args.chunk, None, given)
    recording = _read(args)
    n_kv_heads = recording.n_kv_heads if args.kv_heads is None else args.kv_heads
    return Attention(recording.rows(), n_kv_heads, args.prompt_len, args.chunk, recording, given)


def inputs_for(scorer: Scorer, attention: Attention) -> dict[str, Any] | None:
    """Choose what a scorer needs of the caller: from the file, else estimated from the trace's queries.

    An estimate from the queries that are replayed knows more than one from another text would.
    """
    found = {name: x for name, x in (attention.given or {}).items() if name in scorer.inputs}
    missing, recording = scorer.inputs - found.keys(), attention.recorded
    if recording is not None and recording.queries is not None:
        if "filters" in missing:
            from h2o_core.scorers.qfilters import filters_from

            found["filters"] = filters_from(recording.queries, attention.n_kv_heads or recording.heads or 1)
        if "query_mean" in missing:
            from h2o_core.scorers.expected_attention import statistics_from

            found |= statistics_from(recording.queries, recording.scale or 1.0) | found
    return found or None


def _given(path: str | None) -> dict[str, Any] | None:
    if path is None:
        return None
    import mlx.core as mx

    try:
        return dict(mx.load(path, format="safetensors"))  # type: ignore[arg-type]
    except (RuntimeError, OSError) as error:
        raise ValueError(f"--inputs {path} is no safetensors file: {error}") from error


def _read(args: argparse.Namespace) -> "Recording":
    from h2o_core.traces import read_trace

    return read_trace(args.attention, args.layer)


def make(kind: str, args: argparse.Namespace) -> "Planted":
    """Make attention up."""
    from h2o_core.generators import GENERATORS

    return GENERATORS[kind](n_steps=args.steps, n_heads=args.heads, seed=args.seed)


def counted(rows: "Rows", what: str) -> Iterator[Any]:
    """Pass the blocks on, and count their rows on standard error while it is a terminal."""
    done, shown = 0, time.monotonic()
    for block in rows:
        yield block
        done += block.shape[-2]
        if sys.stderr.isatty() and (time.monotonic() - shown > _SECONDS or done == rows.shape[-1]):
            shown = time.monotonic()
            end = "\n" if done == rows.shape[-1] else ""
            print(f"\r{what}: {done} of {rows.shape[-1]} steps", end=end, file=sys.stderr, flush=True)
