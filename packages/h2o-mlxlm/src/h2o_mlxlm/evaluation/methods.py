"""The caches that are measured against each other, by name: one line each in ``METHODS``, and every scorer.

mlx and mlx_lm load when the first cache is made, so that names and settings are checked before a model is.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from itertools import product
from types import NoneType, UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from h2o_core import H2OConfig
from h2o_core.scorer import scorer_from, scorer_names
from h2o_mlxlm.budgets import calibrated_config
from h2o_mlxlm.needs import GROUPS, LEAST, LEVELS, Needs, load_needs, packaged

Make = Callable[[Any, int, dict[str, Any], int], list[Any]]
"""(model, budget, settings, seed) to fresh caches, one a layer."""


class Method(NamedTuple):
    """How to make a method's caches, and which of the arguments it looks at."""

    make: Make
    bounded: bool = True
    settings: bool = False  # fields of H2OConfig
    seeded: bool = False
    scorer: str = "h2o"  # as scorer_from reads it
    config: Callable[..., H2OConfig] = H2OConfig  # of the budget and the settings
    also: Callable[[], str] = str  # what else its caches depend on


def _full(model: Any, budget: int, settings: dict[str, Any], seed: int) -> list[Any]:
    from mlx_lm.models.cache import make_prompt_cache

    caches: list[Any] = make_prompt_cache(model)
    return caches


def _recency(model: Any, budget: int, settings: dict[str, Any], seed: int) -> list[Any]:
    from mlx_lm.models.cache import KVCache, RotatingKVCache

    own = _full(model, budget, settings, seed)
    return [RotatingKVCache(budget, keep=N_KEPT) if type(c) is KVCache else c for c in own]


def _h2o(model: Any, budget: int, settings: dict[str, Any], seed: int, **how: Any) -> list[Any]:
    from h2o_mlxlm.integration import make_prompt_cache

    return make_prompt_cache(model, H2OConfig(budget=budget, **settings), **how)


def _pyramid(model: Any, budget: int, settings: dict[str, Any], seed: int) -> list[Any]:
    from h2o_mlxlm.budgets import pyramid
    from h2o_mlxlm.integration import bounded_layers, make_prompt_cache

    return make_prompt_cache(model, pyramid(H2OConfig(budget=budget, **settings), bounded_layers(model)))


def _adaptive(model: Any, budget: int, settings: dict[str, Any], seed: int) -> list[Any]:
    from h2o_mlxlm.integration import make_prompt_cache

    return make_prompt_cache(model, H2OConfig(budget=budget, **settings), heads="adaptive")


def _by_heads(model: Any, budget: int, settings: dict[str, Any], seed: int, needs: Needs | None = None) -> list[Any]:
    from h2o_mlxlm.integration import make_prompt_cache

    return make_prompt_cache(model, calibrated_config(budget, **settings), heads=needs or "calibrated")


def _by_layers(model: Any, budget: int, settings: dict[str, Any], seed: int, needs: Needs | None = None) -> list[Any]:
    from h2o_mlxlm.integration import calibrated_layers, make_prompt_cache

    return make_prompt_cache(model, calibrated_layers(model, calibrated_config(budget, **settings), needs))


def _calibrated(make: Callable[..., list[Any]], needs: Needs | None = None) -> Method:
    """A method that goes by needs: those given, or those that come with the package."""

    def also() -> str:
        return repr((needs or packaged(), LEVELS, LEAST, GROUPS))

    return Method(partial(make, needs=needs), settings=True, config=calibrated_config, also=also)


def _random(model: Any, budget: int, settings: dict[str, Any], seed: int) -> list[Any]:
    from h2o_mlxlm.evaluation.random_mass import random_caches

    return random_caches(_h2o(model, budget, settings | {"decay": 1.0}, seed), seed)


FULL, BASELINE = "full", "recency"
N_KEPT = 4  # leading tokens that recency never lets go

BY_NEED = {"calibrated": _by_heads, "calibrated-layers": _by_layers}

METHODS = {
    FULL: Method(_full, bounded=False),
    BASELINE: Method(_recency),
    "h2o": Method(_h2o, settings=True),
    "pyramid": Method(_pyramid, settings=True),
    "adaptive": Method(_adaptive, settings=True),
    **{name: _calibrated(make) for name, make in BY_NEED.items()},
    "h2o-8bit": Method(partial(_h2o, kv_bits=8), settings=True),
    "h2o-4bit": Method(partial(_h2o, kv_bits=4), settings=True),
    "h2o-8bit-4bit": Method(partial(_h2o, kv_bits=(8, 4)), settings=True),
    "h2o-kivi": Method(partial(_h2o, kv_bits=4, kv_group_size=32, kv_quantizer="kivi"), settings=True),
    "h2o-gear": Method(partial(_h2o, kv_bits=4, kv_group_size=32, kv_quantizer="gear"), settings=True),
    "random": Method(_random, settings=True, seeded=True),
}


@dataclass(frozen=True)
class Variant:
    """A method with everything that it is run with.

    Args:
        method: A name in ``METHODS``, a scorer such as ``"snapkv window=16"``, ``"calibrated FILE"`` or
            ``"calibrated-layers FILE"`` with what ``h2o-mlxlm calibrate`` wrote, or ``package.module:function``.
        budget: Tokens per KV head; 0 for a method without one.
        settings: As ``settings_text`` writes them.
        seed: Of random numbers.
        label: Whatever the user wants to tell this run by.
    """

    method: str
    budget: int = 0
    settings: str = ""
    seed: int = 0
    label: str = ""

    def caches(self, model: Any) -> list[Any]:
        """Make fresh caches."""
        return method_of(self.method).make(model, self.budget, settings_of(self.settings), self.seed)

    @property
    def config(self) -> str:
        """Hash the whole configuration, so that rows measured under other defaults are not taken for this."""
        method = method_of(self.method)
        if not method.settings:
            return ""
        config = method.config(budget=self.budget, scorer=scorer_from(method.scorer), **settings_of(self.settings))
        return hashlib.sha256((json.dumps(asdict(config), sort_keys=True) + method.also()).encode()).hexdigest()[:8]

    @property
    def columns(self) -> dict[str, str]:
        """What tells this variant's rows from others'."""
        names = ("method", "budget", "settings", "config", "seed", "label")
        return {name: str(getattr(self, name)) for name in names}

    @property
    def name(self) -> str:
        """Name it in a table or a file."""
        return " ".join(part for part in (self.method, self.settings, self.label) if part)


def method_of(name: str) -> Method:
    """Find a method by its name, or a scorer's, or import ``package.module:function``, a function of (model, budget).

    Raises:
        OSError: There is no such file.
        ValueError: There is no such method, the scorer needs what is made from a prompt, or the file holds no needs.
    """
    if name in METHODS:
        return METHODS[name]
    shape, _, file = name.partition(" ")
    if file and shape in BY_NEED:
        return _calibrated(BY_NEED[shape], load_needs(file))
    if name.split()[:1] and name.split()[0] in scorer_names():
        return _of_scorer(name)
    module, colon, function = name.partition(":")
    if not colon:
        there = ", ".join(dict.fromkeys([*METHODS, *scorer_names()]))
        raise ValueError(f"no method {name!r}: there are {there}, or package.module:function")
    try:
        make = getattr(import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"method {name!r} can't be imported: {error}") from error
    return Method(lambda model, budget, settings, seed: list(make(model, budget)))


def _of_scorer(text: str) -> Method:
    scorer = scorer_from(text)
    if scorer.inputs:
        raise ValueError(
            f"method {text!r} needs {', '.join(sorted(scorer.inputs))}, which are made from a text of your choice: "
            "name package.module:function, a function of (model, budget) that makes them with h2o_mlxlm.inputs"
        )

    def make(model: Any, budget: int, settings: dict[str, Any], seed: int) -> list[Any]:
        return _h2o(model, budget, settings | {"scorer": scorer}, seed)

    return Method(make, settings=True, scorer=text)


def variants(
    methods: Sequence[str],
    budgets: Sequence[int],
    settings: Sequence[str] = ("",),
    seeds: Sequence[int] = (0,),
    label: str = "",
    sampled: bool = False,
) -> list[Variant]:
    """List every combination once, leaving out what a method does not look at.

    Args:
        methods: Names.
        budgets: Tokens per KV head.
        settings: Texts such as ``"grace=16 decay=1.0"``, one for each variant.
        seeds: Of random numbers.
        label: Goes into every variant.
        sampled: Every method runs with each seed, not just those that are random themselves.

    Raises:
        ValueError: A method, a field or a value is not known, or does not go with a budget.
    """
    written = [settings_text(settings_of(text)) for text in settings or [""]]
    found: dict[Variant, None] = {}
    for name in methods:
        method = method_of(name)
        chosen = product(
            budgets if method.bounded else [0],
            written if method.settings else [""],
            seeds if method.seeded or sampled else [0],
        )
        found |= dict.fromkeys(Variant(name, *choice, label) for choice in chosen)
    for variant in found:
        _check(variant)
    return list(found)


def _check(variant: Variant) -> None:
    try:
        _ = variant.config
    except (TypeError, ValueError) as error:
        raise ValueError(f"--settings {variant.settings!r} with budget {variant.budget}: {error}") from None


def settings_of(text: str) -> dict[str, Any]:
    """Read fields of ``H2OConfig``: ``"grace=16 decay=1.0"``.

    Raises:
        ValueError: A field is not known, or its value is of the wrong kind.
    """
    hints = {name: hint for name, hint in get_type_hints(H2OConfig).items() if name not in ("budget", "scorer")}
    values = {}
    for part in text.split():
        name, equals, value = part.partition("=")
        if name not in hints or not equals:
            raise ValueError(f"--settings takes FIELD=VALUE with a field of {', '.join(hints)}, got {part!r}")
        values[name] = _read(name, value, hints[name])
    return values


def settings_text(values: dict[str, Any]) -> str:
    """Write settings in the one way that rows are told by."""
    return " ".join(f"{name}={values[name]}" for name in sorted(values))


def _read(name: str, value: str, hint: Any) -> Any:
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    if NoneType in kinds and value.lower() == "none":
        return None
    if bool in kinds:
        if value.lower() not in ("true", "false"):
            raise ValueError(f"--settings: {name} must be true or false, got {value!r}")
        return value.lower() == "true"
    for kind, described in ((int, "a whole number"), (float, "a number")):
        if kind in kinds:
            try:
                return kind(value)
            except ValueError:
                raise ValueError(f"--settings: {name} must be {described}, got {value!r}") from None
    return value
