"""Configurations from texts such as ``"snapkv window=16 budget=128"``."""

from dataclasses import replace

from h2o_core.config import H2OConfig
from h2o_core.scorer import field_from, scorer_kind, scorer_names
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
    fields = dict(field_from(word, known, "field of H2OConfig") for word in words if "=" in word)
    scorer = own(**{name: fields.pop(name) for name in list(fields) if name not in ours})
    size = fields.pop("budget", budget)
    return replace(variant(size) if variant else H2OConfig(budget=size, scorer=scorer), scorer=scorer, **fields)
