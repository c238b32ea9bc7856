"""Flags that commands share: mlx_lm's, ours, and those of mlx_lm's that an H2O cache can't honour."""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

from h2o_core import H2OConfig
from h2o_core.scorer import Scorer, scorer_from

REFUSED = {
    "--max-kv-size": "use --budget, which bounds the cache of every model",
    "--quantized-kv-start": "rows are stored in one form from the first token on, with --kv-bits quantised",
    "--draft-model": "drafted tokens are taken back, which generate alone has caches for",
    "--num-draft-tokens": "drafted tokens are taken back, which generate alone has caches for",
    "--image": "prompts are text",
    "--quantize-activations": "weights are used as they are stored",
    "-qa": "weights are used as they are stored",
    "--pipeline": "a model runs in one process here",
    "--use-default-chat-template": "the tokenizer's own template is used, or none with --ignore-chat-template",
}


STORAGE = ("kv_bits", "kv_group_size", "kv_quantizer")
"""Flags that say how rows are stored."""

CALIBRATED = ("calibrated", "calibrated-layers")
"""Shapes of budgets that were measured, with settings that go with them."""

HOW = ("backend", *STORAGE)
"""Flags that are arguments of ``make_prompt_cache``."""


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


def add_refused(parser: argparse.ArgumentParser, but: Sequence[str] = ()) -> None:
    """Know mlx_lm's flags that can't work, so that they are refused by name; ``but`` are those of this command."""
    for flag in [flag for flag in REFUSED if flag not in but]:
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


def scorer(text: str) -> Scorer:
    """Read a scorer and its parameters, such as ``snapkv window=16``."""
    try:
        return scorer_from(text)
    except (TypeError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def needs(path: str) -> Any:
    """Read a file that ``h2o-mlxlm calibrate`` wrote."""
    from h2o_mlxlm.needs import load_needs

    try:
        return load_needs(path)
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from None


class _Given(argparse.Action):
    """Stores a value, or True without one, and that it was given: a saved cache has its own configuration."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, True if self.nargs == 0 else values)
        namespace.given = {**getattr(namespace, "given", {}), self.dest: self.option_strings[0]}


def add_cache_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that make an ``H2OConfig``."""
    d = H2OConfig()
    add = partial(parser.add_argument_group("cache").add_argument, action=_Given)
    add(
        "--budget",
        type=budget,
        default=d.budget,
        help="Tokens kept per head, or memory such as 2GB (%(default)s)",
    )
    add("--n-sink", type=int, default=d.n_sink, help="Leading tokens never evicted (%(default)s)")
    add("--grace", type=int, help="Newest tokens never evicted (a quarter of the budget, or half: see --budget-shape)")
    add("--decay", type=float, default=d.decay, help="Factor on scores per token, in (0, 1] (%(default)s)")
    add(
        "--long-share",
        type=float,
        default=d.long_share,
        help="Share of heavy hitters kept for sums that never decay, in [0, 1] (%(default)s)",
    )
    add("--scorer", type=scorer, default=d.scorer, help="What scores, with parameters: 'snapkv window=16' (h2o)")
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
        nargs=0,
        default=False,
        help="Hold the whole prompt until its last token",
    )
    add(
        "--budget-shape",
        choices=["equal", "pyramid", "adaptive", *CALIBRATED],
        default="equal",
        help="Who holds more for the same total (%(default)s): nobody, lower layers, heads that look at more in this "
        "prompt, or heads or layers that were measured to need more. With these two --grace is half of the budget and "
        "--long-share 0.35 if they are not given",
    )
    add(
        "--needs",
        type=needs,
        help="What h2o-mlxlm calibrate measured of the model, for --budget-shape calibrated and calibrated-layers "
        "(what comes with the package, for the model that is used when none is named)",
    )
    add(
        "--rewind",
        type=int,
        help="Newest tokens that can be taken back, for a draft model (its --num-draft-tokens; 0 without one)",
    )
    add(
        "--backend",
        choices=["auto", "reference", "metal", "cuda"],
        default="auto",
        help="Whose code does the work (%(default)s: kernels where there is Metal or CUDA)",
    )
    add("--kv-bits", type=int, help="Store rows in 8 or 4 bits a number (as the model makes them)")
    add("--kv-group-size", type=int, default=64, help="Numbers that share a scale: 32, 64 or 128 (%(default)s)")
    add(
        "--kv-quantizer",
        choices=["per_token", "kivi", "gear"],
        default="per_token",
        help="What shares a scale: numbers of a token, or of a channel over a block of tokens (%(default)s)",
    )


def check_cache_flags(args: argparse.Namespace) -> None:
    """Refuse what no model can keep before one is loaded, for that takes time.

    Raises:
        ValueError: A flag's value is outside its range.
    """
    from h2o_mlxlm.backend import backend_of
    from h2o_mlxlm.forms import forms

    if args.needs is not None and args.budget_shape not in CALIBRATED:
        raise ValueError(
            f"--needs is for --budget-shape {' and '.join(CALIBRATED)} alone, got {args.budget_shape}: leave it out"
        )
    backend_of(args.backend)
    forms(args.kv_bits, args.kv_group_size, args.kv_quantizer)
    if isinstance(args.budget, int):
        config_from(args, args.budget)


def check_no_inputs(args: argparse.Namespace) -> None:
    """Refuse a scorer whose inputs are made from a prompt, where there is none yet or a file could not hold them.

    Raises:
        ValueError: It is one.
    """
    if needed := args.scorer.inputs:
        raise ValueError(
            f"--scorer {args.scorer.name} needs {', '.join(sorted(needed))}, which generate alone makes, from its "
            "prompt: use another scorer here, or make_prompt_cache with inputs in Python"
        )


def how_from(args: argparse.Namespace) -> dict[str, Any]:
    """Say what ``make_prompt_cache`` and ``install`` take, beside the model and the configuration."""
    shape = args.budget_shape
    heads = args.needs or shape if shape in ("adaptive", "calibrated") else "equal"
    return {"heads": heads} | {name: getattr(args, name) for name in HOW}


def config_from(args: argparse.Namespace, tokens: int) -> H2OConfig:
    """Make the configuration that the flags ask for, with the budget in tokens."""
    from h2o_mlxlm.budgets import calibrated_config

    fields = {
        name: getattr(args, name) for name in ("n_sink", "decay", "scorer", "queries", "positions", "trained_length")
    }
    fields |= {"evict_during_prefill": not args.no_evict_during_prefill, "rewind": rewind_from(args)}
    # Their defaults go with the shape.
    fields |= {name: getattr(args, name) for name in ("grace", "long_share") if name in getattr(args, "given", {})}
    return (calibrated_config if args.budget_shape in CALIBRATED else H2OConfig)(budget=tokens, **fields)


def check_given(args: argparse.Namespace, made: Mapping[str, Any], tokens: int) -> None:
    """Refuse flags that were given and are not what a saved cache was made with.

    Args:
        args: The flags.
        made: What it was made with, by name: the configuration's fields, and how rows are stored.
        tokens: The budget of the flags.
    """
    for name, flag in getattr(args, "given", {}).items():
        field = name.removeprefix("no_")
        if field not in made:
            continue
        asked = {"budget": tokens, "no_evict_during_prefill": False}.get(name, getattr(args, name))
        if asked != made[field]:
            raise ValueError(
                f"{flag} asks for {field}={asked}, but {args.prompt_cache_file} was made with {field}={made[field]}: "
                f"leave {flag} out, or make the file anew"
            )


def rewind_from(args: argparse.Namespace) -> int:
    """Say how many tokens are to be taken back: as many as are drafted at a time, unless the flags say."""
    if args.rewind is not None:
        return int(args.rewind)
    return args.num_draft_tokens if getattr(args, "draft_model", None) else 0
