"""A model for a command, and what its flags make of it: whatever goes wrong becomes one line."""

import argparse
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from h2o_core import H2OConfig
from h2o_core.config import MOST_TOKENS
from h2o_mlxlm.cli import flags


def loaded(name: str | None, **kwargs: Any) -> Any:
    """Load a model and its tokenizer.

    Args:
        name: As ``h2o_mlxlm.load`` takes it.
        kwargs: What else it takes.

    Raises:
        ValueError: It can't be loaded.
    """
    from h2o_mlxlm.models import load

    with in_one_line(name):
        return load(name, **kwargs)


@contextmanager
def in_one_line(name: str | None) -> Iterator[None]:
    """Turn whatever a model fails with into a ``ValueError`` that names the model."""
    try:
        yield
    except Exception as error:
        # A hub, a config, a weight or tokenizer file: each fails with errors of its own kind, few of which say where.
        said = str(error) if isinstance(error, (OSError, ValueError)) else repr(error)
        raise ValueError(said if name is None or name in said else f"{name}: {said}") from error


def config_for(args: argparse.Namespace, model: Any) -> H2OConfig:
    """Make the configuration that the flags ask for, a budget in bytes turned into this model's tokens.

    Raises:
        ValueError: A flag's value is outside its range, or not one token fits.
    """
    return flags.config_from(args, tokens_of(args, model))


def tokens_of(args: argparse.Namespace, model: Any) -> int:
    """Read the budget of the flags in tokens, of this model's if it is in bytes."""
    if isinstance(args.budget, int):
        return args.budget
    return tokens_in(model, args.budget, flags.heads_of(args))


def tokens_in(model: Any, n_bytes: float, heads: Any = "equal") -> int:
    """Find the largest budget whose caches fit into so many bytes, the empty slot included.

    Args:
        model: The model.
        n_bytes: Bytes.
        heads: See ``make_prompt_cache``. How budgets differ between layers does not matter, only their total.

    Raises:
        ValueError: Not one token fits.
    """
    import mlx.core as mx

    from h2o_mlxlm.adaptive import OURS
    from h2o_mlxlm.integration import make_prompt_cache

    # Works with every model; heads of their own budgets need its queries.
    config = H2OConfig(budget=8, n_sink=0, grace=0, queries="key" if heads == "equal" else "true")
    # A prompt takes one slot a token: two lengths show a slot's size and what comes on top of the slots.
    sizes = []
    for n in (2, 3):
        caches = make_prompt_cache(model, config, heads=heads)
        mx.eval(model(mx.zeros((1, n), mx.int32), cache=caches))
        sizes.append(sum(c.nbytes for c in caches if isinstance(c, OURS)))
    slot = sizes[1] - sizes[0]
    fixed = sizes[0] - 2 * slot
    tokens = int((min(n_bytes, MOST_TOKENS * slot) - fixed) // slot) - 1
    if tokens < 1:
        raise ValueError(f"--budget: {n_bytes:.0f} bytes hold no token, one takes {2 * slot + fixed} bytes here")
    return tokens


def mean_of(figures: Iterable[Any]) -> int:
    """The mean over layers, of numbers and of arrays with a number for each head."""
    import mlx.core as mx

    from h2o_mlxlm.evaluation.passes import numbers

    return round(fmean(fmean(numbers(x.flatten())) if isinstance(x, mx.array) else x for x in figures))
