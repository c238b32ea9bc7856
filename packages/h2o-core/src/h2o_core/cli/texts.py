"""Configurations and scorers from texts such as ``"snapkv window=16 budget=128"``."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from h2o_core.config import H2OConfig
from h2o_core.scorer import Scorer, scorer_kind, scorer_names, scorer_of
from h2o_core.variants import VARIANTS

NAMES = ", ".join(VARIANTS)


def configs_from(texts: list[str] | None, budget: int) -> dict[str, H2OConfig]:
    """Read configurations, each from a text such as ``"text-generation budget=128"``.

    Args:
        texts: A variant, or a scorer, or neither, and fields of ``H2OConfig`` and of the scorer. None for the
            defaults and every published variant.
        budget: Where a text does not say.

    Returns:
        By text, the defaults as ``default``.

    Raises:
        ValueError: A name or a field is not known, or a value does not fit.

    >>> list(configs_from(["grace=8", "morphkv window=16"], 64).values())[1].scorer.window
    16
    """
    return {" ".join(text.split()) or "default": _config(text, budget) for text in texts or ["", *VARIANTS]}


def scorer_from(text: str) -> Scorer:
    """Read a scorer from a text such as ``"snapkv window=16"``.

    Raises:
        ValueError: The name or a parameter is not known, or a value does not fit.
    """
    name, *words = text.split() or [""]
    known = scorer_kind(name).__dataclass_fields__
    return scorer_of({"name": name} | dict(_field(word, known, f"parameter of scorer {name!r}") for word in words))


def _config(text: str, budget: int) -> H2OConfig:
    words = [word for word in text.split() if word != "default"]
    names = [word for word in words if "=" not in word]
    if len(names) > 1 or not {*names} <= {*VARIANTS, *scorer_names()}:
        raise ValueError(
            f"a configuration is one of {NAMES}, or none, or a scorer ({', '.join(scorer_names())}), and FIELD=VALUE, "
            f"got {text!r}"
        )
    variant = VARIANTS.get(names[0]) if names else None
    own = scorer_kind("h2o" if variant or not names else names[0])
    ours = {name: field for name, field in H2OConfig.__dataclass_fields__.items() if name != "scorer"}
    known = ours | {name: field for name, field in own.__dataclass_fields__.items() if field.init}
    fields = dict(_field(word, known, "field of H2OConfig") for word in words if "=" in word)
    scorer = own(**{name: fields.pop(name) for name in list(fields) if name not in ours})
    size = fields.pop("budget", budget)
    return replace(variant(size) if variant else H2OConfig(budget=size, scorer=scorer), scorer=scorer, **fields)


def _field(word: str, known: Mapping[str, Any], what: str) -> tuple[str, Any]:
    name, _, text = word.partition("=")
    if name not in known:
        raise ValueError(f"{name!r} is no {what}: there are {', '.join(known)}")
    if text in ("True", "true", "False", "false") and isinstance(known[name].default, bool):
        return name, text in ("True", "true")
    for kind in (int, float):
        try:
            return name, kind(text)
        except ValueError:
            continue
    return name, text
