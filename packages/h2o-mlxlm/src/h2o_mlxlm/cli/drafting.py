"""Speculative decoding on the command line: the model that drafts, and how many tokens at a time."""

import argparse
from typing import Any

from h2o_core.config import MOST_REWIND
from h2o_mlxlm.cli.flags import CALIBRATED, number
from h2o_mlxlm.cli.loading import loaded

FLAGS = ("--draft-model", "--num-draft-tokens")
_AT_A_TIME = 3


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add mlx_lm's flags for drafting."""
    add = parser.add_argument_group("drafting").add_argument
    add("--draft-model", help="Smaller model with the same tokenizer; it drafts tokens that the model checks")
    add(
        "--num-draft-tokens",
        type=number(1, MOST_REWIND, int),
        default=_AT_A_TIME,
        help="Tokens drafted at a time (%(default)s)",
    )


def check(args: argparse.Namespace) -> None:
    """Refuse flags that contradict each other.

    Raises:
        ValueError: Tokens are to be drafted by no model, or more of them than may be taken back, or budgets are by
            needs, which are one model's.
    """
    if args.draft_model is None and args.num_draft_tokens != _AT_A_TIME:
        raise ValueError("--num-draft-tokens needs --draft-model, which drafts them")
    if args.draft_model is not None and args.budget_shape in CALIBRATED:
        raise ValueError(
            f"--draft-model can't be used with --budget-shape {args.budget_shape}: needs are of one model, and the "
            "flags for both; use another shape, or make_prompt_cache for each model in Python"
        )
    if args.draft_model is not None and args.rewind is not None and args.rewind < args.num_draft_tokens:
        raise ValueError(
            f"--rewind must be at least --num-draft-tokens, for all of them may be rejected, got {args.rewind} and "
            f"{args.num_draft_tokens}: leave --rewind out"
        )


def load(args: argparse.Namespace, tokenizer: Any) -> Any:
    """Load the model that drafts; None if there is none.

    Raises:
        ValueError: It can't be loaded, or has another vocabulary than the model.
    """
    if args.draft_model is None:
        return None
    model, its_own = loaded(
        args.draft_model,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        trust_remote_code=args.trust_remote_code,
    )
    if its_own.vocab_size != tokenizer.vocab_size:
        raise ValueError(
            f"--draft-model must have the model's tokenizer, but {args.draft_model} knows {its_own.vocab_size} tokens "
            f"and the model {tokenizer.vocab_size}: use a smaller model of the same family"
        )
    return model
