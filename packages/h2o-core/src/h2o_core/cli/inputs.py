"""What a command works on: attention from a file or made up, and the caches to replay it through.

mlx loads when the attention is read, so that help and bad flags are answered at once.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from h2o_core.config import H2OConfig
from h2o_core.variants import VARIANTS

if TYPE_CHECKING:
    from h2o_core.generators import Planted
    from h2o_core.rows import Rows
    from h2o_core.traces import Recording

KINDS = ("zipf", "shift", "needles", "recency", "uniform")
"""What ``h2o_core.generators`` makes."""

NAMES = ", ".join(VARIANTS)
_SECONDS = 0.2  # between two looks at the counter


class Attention(NamedTuple):
    """What is replayed, and how."""

    rows: "Rows"
    n_kv_heads: int | None
    prompt_len: int
    chunk: int


def add_attention(parser: argparse.ArgumentParser) -> None:
    """Add the attention, and the flags that say how it is replayed."""
    add = parser.add_argument
    add("attention", metavar="FILE|KIND", help=f"A trace, or what to make up: {', '.join(KINDS)}")
    add("--layer", type=int, help="Which layer of the trace, if it has several")
    add("--kv-heads", type=int, help="KV heads (the trace's; else one for each query head)")
    add("--prompt-len", type=int, default=1, help="Rows of the first call (%(default)s)")
    add("--chunk", type=int, default=1, help="Rows of each call after it (%(default)s)")
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
    add("--long-share", type=float, help=f"Share of places for old sums ({d.long_share})")
    add("--no-evict-during-prefill", dest="evict_during_prefill", action="store_false", help="Hold the whole prompt")


def config_from(args: argparse.Namespace) -> H2OConfig:
    """Make the configuration that ``add_config``'s flags ask for."""
    return H2OConfig(**{name: value for name, value in vars(args).items() if name in H2OConfig.__dataclass_fields__})


def configs_from(texts: list[str] | None, budget: int) -> dict[str, H2OConfig]:
    """Read configurations, each from a text such as ``"text-generation budget=128"``.

    Args:
        texts: None for the defaults and every published variant.
        budget: Where a text does not say.

    Returns:
        By text, the defaults as ``default``.

    Raises:
        ValueError: A name or a field is not known, or a value does not fit.

    >>> list(configs_from(["grace=8", "algorithm-1"], 64).values())[0].grace
    8
    """
    found = {}
    for text in ["", *VARIANTS] if texts is None else texts:
        words = text.split()
        fields = dict(_field(word) for word in words if "=" in word)
        names = [word for word in words if "=" not in word and word != "default"]
        unknown = [name for name in names if name not in VARIANTS]
        if len(names) > 1 or unknown:
            raise ValueError(f"a configuration is one of {NAMES}, or none, and FIELD=VALUE, got {text!r}")
        size = fields.pop("budget", budget)
        config = replace(VARIANTS[names[0]](size), **fields) if names else H2OConfig(budget=size, **fields)
        found[" ".join(words) or "default"] = config
    return found


def _field(word: str) -> tuple[str, Any]:
    name, _, text = word.partition("=")
    known = H2OConfig.__dataclass_fields__
    if name not in known:
        raise ValueError(f"{name!r} is no field of H2OConfig: there are {', '.join(known)}")
    if text in ("True", "true", "False", "false") and isinstance(known[name].default, bool):
        return name, text in ("True", "true")
    for kind in (int, float):
        try:
            return name, kind(text)
        except ValueError:
            continue
    return name, text


def read_attention(args: argparse.Namespace) -> Attention:
    """Read the trace that the flags name, or make it up."""
    if args.attention in KINDS:
        if args.layer is not None:
            raise ValueError(f"--layer is for a trace in a file, got {args.attention}")
        return Attention(make(args.attention, args).attention, args.kv_heads, args.prompt_len, args.chunk)
    recording = _read(args)
    n_kv_heads = recording.n_kv_heads if args.kv_heads is None else args.kv_heads
    return Attention(recording.rows(), n_kv_heads, args.prompt_len, args.chunk)


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
