"""A model for a command, and what its flags make of it: whatever goes wrong becomes one line."""

import argparse
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from h2o_core import H2OConfig
from h2o_core.config import MOST_TOKENS, Queries
from h2o_core.scorer import Scorer
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


def config_for(args: argparse.Namespace, model: Any, draft_model: Any = None) -> H2OConfig:
    """Make the configuration that the flags ask for, a budget in bytes turned into this model's tokens.

    Raises:
        ValueError: A flag's value is outside its range, or not one token fits.
    """
    return flags.config_from(args, tokens_of(args, model, draft_model))


def options_for(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Say what ``make_prompt_cache`` and ``install`` take by the flags, beside the model; raises as ``config_for``."""
    return cache_options(args, model, config_for(args, model))


def cache_options(args: argparse.Namespace, model: Any, config: H2OConfig) -> dict[str, Any]:
    """Say what ``make_prompt_cache`` and ``install`` take by the flags, beside the model, under a configuration."""
    return {"config": _shaped(args, model, config), **flags.how_from(args)}


def _shaped(args: argparse.Namespace, model: Any, config: H2OConfig) -> H2OConfig | list[H2OConfig]:
    """Divide the budget among layers, if that is asked for."""
    from h2o_mlxlm.budgets import pyramid
    from h2o_mlxlm.integration import bounded_layers, calibrated_layers

    if args.budget_shape == "pyramid":
        return pyramid(config, bounded_layers(model))
    if args.budget_shape == "calibrated-layers":
        return calibrated_layers(model, config, args.needs)
    return config


def tokens_of(args: argparse.Namespace, model: Any, draft_model: Any = None) -> int:
    """Read the budget of the flags in tokens, of these models if it is in bytes."""
    if isinstance(args.budget, int):
        return args.budget
    models = [model] if draft_model is None else [model, draft_model]
    return tokens_in(models, args.budget, flags.how_from(args), flags.rewind_from(args), args.scorer)


def tokens_in(
    models: Sequence[Any], n_bytes: float, how: dict[str, Any], rewind: int = 0, scorer: Scorer | None = None
) -> int:
    """Find the largest budget whose caches fit into so many bytes, the empty slot and tokens to take back included.

    Args:
        models: The model, and one that drafts for it if there is one: their caches have equal budgets.
        n_bytes: Bytes for the caches of all.
        how: What ``make_prompt_cache`` takes. How budgets differ between layers does not matter, only their total.
        rewind: Of the configuration.
        scorer: Of the configuration, for what it keeps of each token; None keeps nothing more.

    Raises:
        ValueError: Not one token fits, or what a token takes is not known.
    """
    if how.get("kv_quantizer", "per_token") != "per_token":
        raise ValueError(
            f"--budget in bytes needs rows of one size, and --kv-quantizer {how['kv_quantizer']} keeps blocks with "
            "holes: give --budget in tokens"
        )
    # Full caches grow by a slot with each token of the budget: two of them show a slot's size and what is on top.
    sizes = [sum(_full(model, budget, how, rewind, scorer) for model in models) for budget in (8, 9)]
    slot = sizes[1] - sizes[0]
    fixed = sizes[0] - 8 * slot
    tokens = int((min(n_bytes, MOST_TOKENS * slot) - fixed) // slot)
    if tokens < 1:
        raise ValueError(f"--budget: {n_bytes:.0f} bytes hold no token, one takes {slot + fixed} bytes here")
    return tokens


def _full(model: Any, budget: int, how: dict[str, Any], rewind: int, scorer: Scorer | None) -> int:
    """Bytes of a model's caches that have seen more than they keep and take back."""
    import mlx.core as mx

    from h2o_mlxlm.attention import OURS
    from h2o_mlxlm.integration import make_prompt_cache

    # Without arrays of its own a scorer changes no size, and may want inputs.
    kept: Any = scorer if scorer is not None and scorer.extras else "h2o"
    # Heads of a layer or model share its places, whoever gets them.
    how = how | {"heads": "adaptive" if how.get("heads") == "adaptive" else "equal"}
    # Key queries work with every model; the others need the model's own.
    own = rewind or how["heads"] == "adaptive" or kept != "h2o"
    queries: Queries = "true" if own else "key"
    config = H2OConfig(budget, n_sink=0, grace=0, queries=queries, rewind=rewind, scorer=kept)
    caches = make_prompt_cache(model, config, **how)
    for n in (budget + rewind + 2, 1):
        mx.eval(model(mx.zeros((1, n), mx.int32), cache=caches))
    return sum(c.nbytes for c in caches if isinstance(c, OURS))


def mean_of(figures: Iterable[Any]) -> int:
    """The mean over layers, of numbers and of arrays with a number for each head."""
    import mlx.core as mx

    from h2o_mlxlm.evaluation.passes import numbers

    return round(fmean(fmean(numbers(x.flatten())) if isinstance(x, mx.array) else x for x in figures))
