"""Flags that commands share: mlx_lm's, ours, and those of mlx_lm's that an H2O cache can't honour."""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from h2o_core import H2OConfig

REFUSED = {
    "--max-kv-size": "use --budget, which bounds the cache of every model",
    "--quantized-kv-start": "rows are stored in one form from the first token on, with --kv-bits quantised",
    "--draft-model": "evicted rows can't be rewound",
    "--num-draft-tokens": "evicted rows can't be rewound",
    "--prompt-cache-file": "saved caches hold no scores; send the prompt again",
    "--image": "prompts are text",
    "--quantize-activations": "weights are used as they are stored",
    "-qa": "weights are used as they are stored",
    "--use-default-chat-template": "the tokenizer's own template is used, or none with --ignore-chat-template",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


class _Refuse(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> NoReturn:
        parser.error(f"{option_string} can't be used with an H2O cache: {REFUSED[str(option_string)]}")


def add_refused(parser: argparse.ArgumentParser) -> None:
    """Know mlx_lm's flags that can't work, so that they are refused by name."""
    for flag in REFUSED:
        # Takes whatever follows: the answer is the same with a value and without.
        parser.add_argument(flag, action=_Refuse, nargs="*", help=argparse.SUPPRESS)


def str2bool(text: str) -> bool:
    """Read a truth value as mlx_lm does."""
    return text.lower() not in ("false", "f")


def number(low: float, high: float, kind: type = float) -> Any:
    """Make a reader of numbers in [low, high]."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be a number, got {text!r}") from None
        if not low <= value <= high:
            bounds = f"at least {low}" if high == float("inf") else f"between {low} and {high}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, got {text}")
        return value

    return read


def json_object(text: str) -> dict[str, Any]:
    """Read a JSON object."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text!r}")
    return value


def budget(text: str) -> int | float:
    """Read a budget: a whole number of tokens (int), or bytes of memory such as 2GB (float)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT]?)B)?\s*", text, re.IGNORECASE)
    if match is None or ("." in match[1] and match[2] is None):
        raise argparse.ArgumentTypeError(f"must be tokens such as 512 or memory such as 2GB, got {text!r}")
    if match[2] is None:
        return int(match[1])
    return float(match[1]) * 1000.0 ** " KMGT".index(match[2].upper() or " ")


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make an ``H2OConfig``."""
    d = H2OConfig()
    add = parser.add_argument_group("cache").add_argument
    add(
        "--budget",
        type=budget,
        default=d.budget,
        help="Tokens kept per head, or memory such as 2GB (%(default)s)",
    )
    add("--n-sink", type=int, default=d.n_sink, help="Leading tokens never evicted (%(default)s)")
    add("--grace", type=int, help="Newest tokens never evicted (a quarter of the budget)")
    add("--decay", type=float, default=d.decay, help="Factor on scores per token, in (0, 1] (%(default)s)")
    add(
        "--long-share",
        type=float,
        default=d.long_share,
        help="Share of heavy hitters kept for sums that never decay, in [0, 1] (%(default)s)",
    )
    add("--queries", choices=["true", "key"], default=d.queries, help="Whose attention counts (%(default)s)")
    add(
        "--positions",
        choices=["original", "rolling", "auto"],
        default=d.positions,
        help="Rotary positions (%(default)s)",
    )
    add(
        "--trained-length",
        type=int,
        help="Positions the model was trained for, for --positions auto (the model's own)",
    )
    add(
        "--no-evict-during-prefill",
        action="store_true",
        help="Hold the whole prompt until its last token",
    )
    add(
        "--backend",
        choices=["auto", "reference", "metal"],
        default="auto",
        help="Whose code does the work (%(default)s: Metal kernels where they run)",
    )
    add("--kv-bits", type=int, help="Store rows in 8 or 4 bits a number (as the model makes them)")
    add("--kv-group-size", type=int, default=64, help="Numbers that share a scale: 32, 64 or 128 (%(default)s)")
    add(
        "--kv-quantizer",
        choices=["per_token", "kivi", "gear"],
        default="per_token",
        help="What shares a scale: numbers of a token, or of a channel over a block of tokens (%(default)s)",
    )


def caches_from(args: argparse.Namespace) -> dict[str, Any]:
    """Return what else the flags ask of ``make_prompt_cache``, which says so if it can't be."""
    from h2o_mlxlm.backend import backend_of
    from h2o_mlxlm.forms import forms

    backend_of(args.backend)
    forms(args.kv_bits, args.kv_group_size, args.kv_quantizer)
    return {name: getattr(args, name) for name in ("backend", "kv_bits", "kv_group_size", "kv_quantizer")}


def config_from(args: argparse.Namespace, tokens: int) -> H2OConfig:
    """Make the configuration that the flags ask for, with the budget in tokens."""
    return H2OConfig(
        budget=tokens,
        n_sink=args.n_sink,
        grace=args.grace,
        decay=args.decay,
        long_share=args.long_share,
        queries=args.queries,
        positions=args.positions,
        trained_length=args.trained_length,
        evict_during_prefill=not args.no_evict_during_prefill,
    )
