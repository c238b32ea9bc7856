"""Which KV heads of a model need room, as ``h2o-mlxlm calibrate`` measures it, and budgets by that. No arrays.

A file is untrusted: what it holds must be what a measurement can be.
"""

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, NoReturn

from h2o_core.config import MOST_TOKENS
from h2o_mlxlm.assignment import assigned
from h2o_mlxlm.checks import is_whole
from h2o_mlxlm.evaluation.results import write_json
from h2o_mlxlm.identity import needs_identity

FORMAT = 1
"""Of a file. Another number for another meaning."""

LEVELS = (0.125, 0.1875, 0.25, 0.375, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8)
"""Budgets that heads get, as multiples of the mean one."""

LEAST = 24
"""Tokens that every head gets, if the mean allows: with fewer, loss grew on the texts that were searched on."""

GROUPS = 3
"""Different budgets in one layer: each costs a step an attention of its own."""

FLOOR = 1e-5
"""The least loss that is told from none."""

SLOPES = (-2.5, -0.3)
"""Between these, loss falls with the budget where nothing was measured: d log loss / d log budget."""

MOST_BYTES, MOST_HEADS, MOST_LOSS = 2**24, 2**13, 1e6
"""Of a file, of a model, and of one head."""


@dataclass(frozen=True)
class Needs:
    """What bounding each KV head alone costs, measured.

    Args:
        model: What ``needs_identity`` says of the model.
        budgets: Tokens, ascending; at least two.
        losses: By layer, head and budget: the divergence KL(full cache ‖ this head alone bounded), as a share of the
            sum over all heads at the middle budget, ``budgets[len(budgets) // 2]``; the mean over texts, each of which
            so has an equal say. Layers are those that get an H2O cache, lowest first.

    Raises:
        ValueError: No measurement can have these values.

    Source:
        Xiao et al., DuoAttention (arXiv 2410.10819), tells heads that look far back from those that don't, by trained
        gates. Here what each head loses is measured, and budgets are graded.
    """

    model: str
    budgets: tuple[int, ...]
    losses: tuple[tuple[tuple[float, ...], ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not 0 < len(self.model) <= 64:
            _refuse(f"model must be an identity of up to 64 letters, got {self.model!r:.80}")
        _check_budgets(self.budgets)
        _check_losses(self.losses, len(self.budgets))

    def budgets_for(
        self, budget: int, levels: Sequence[float] = LEVELS, least: int = LEAST, groups: int = GROUPS
    ) -> list[list[int]]:
        """Give each head a budget, more where more would be lost, for a total of at most ``budget`` times the heads.

        Every head starts at the lowest level. Then again and again the raise of one head, to any higher level, is made
        that saves the most loss per token of those that still fit, until none fits or none saves. Where that gives
        heads of one layer more than ``groups`` different budgets, those closest to each other are raised as one.

        Between two measured budgets, loss is a power of the budget, a straight line in their logarithms; beyond them
        the nearest such line goes on, as steep as ``SLOPES`` allow.

        Args:
            budget: Tokens that a head keeps on average, at most.
            levels: Budgets to choose from, as multiples of ``budget``, rounded down to whole tokens.
            least: Tokens that every head gets, whatever the levels; ``budget``, if that is less.
            groups: Different budgets in one layer, at most. With 1 each layer has one budget, and no step takes
                longer than with equal ones.

        Returns:
            Tokens, by layer and head.

        Raises:
            ValueError: A level is no positive number, the lowest is above 1, or ``least`` or ``groups`` is no whole
                number.

        >>> little, much = (0.02, 0.01), (3.0, 0.7)
        >>> needs = Needs("tiny", (8, 32), ((little, much, little, (0.2, 0.1)), (little,) * 4))
        >>> needs.budgets_for(16, levels=(0.5, 1, 4, 8), least=1)
        [[8, 64, 8, 16], [8, 8, 8, 8]]
        >>> needs.budgets_for(16, levels=(0.5, 1, 1.5), least=1, groups=1)
        [[24, 24, 24, 24], [8, 8, 8, 8]]
        """
        tokens = _tokens(budget, levels, least)
        if not is_whole(groups, 1, len(LEVELS)):
            raise ValueError(f"groups must be a whole number from 1 to {len(LEVELS)}, got {groups!r}")
        layers = [[[_loss_at(self.budgets, head, n) for n in tokens] for head in layer] for layer in self.losses]
        return assigned(layers, tokens, budget * sum(map(len, layers)), groups)


def _tokens(budget: int, levels: Sequence[float], least: int) -> list[int]:
    """Tokens of each level, ascending."""
    if not is_whole(budget, 1, MOST_TOKENS):
        raise ValueError(f"budget must be a whole number from 1 to {MOST_TOKENS}, got {budget!r}")
    if not levels or not all(0 < level <= MOST_TOKENS / budget for level in levels):
        raise ValueError(
            f"levels must be positive multiples of the budget, of at most {MOST_TOKENS} tokens, got {levels!r} with "
            f"budget={budget}"
        )
    if not is_whole(least, 1, MOST_TOKENS):
        raise ValueError(f"least must be a whole number of tokens from 1 to {MOST_TOKENS}, got {least!r}")
    if min(levels) > 1:
        raise ValueError(f"the lowest level must be 1 at most, for budgets to fit, got levels={tuple(levels)}")
    # A product such as 0.29 · 100 falls short of a whole number by its rounding alone.
    return sorted({max(min(least, budget), int(round(level * budget, 6))) for level in levels})


def _loss_at(budgets: Sequence[int], losses: Sequence[float], budget: int) -> float:
    """Read one head's loss at any budget off the line through its measured ones."""
    right = min(max(bisect_left(budgets, budget), 1), len(budgets) - 1)
    low, high = budgets[right - 1], budgets[right]
    at_low, at_high = (math.log(max(losses[i], FLOOR)) for i in (right - 1, right))
    slope = (at_high - at_low) / math.log(high / low)
    if not low <= budget <= high:
        slope = min(max(slope, SLOPES[0]), SLOPES[1])
    end, at_end = (high, at_high) if budget >= high else (low, at_low)
    return math.exp(at_end + slope * math.log(budget / end))


def load_needs(path: str | Path) -> Needs:
    """Read what ``save_needs`` or ``h2o-mlxlm calibrate`` wrote. The file may come from anywhere.

    Raises:
        OSError: There is no such file.
        ValueError: It holds no measurement.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            _refuse(f"it has {size} bytes, and no measurement has more than {MOST_BYTES}")
        return _read(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} holds no needs of heads: {error}") from error


def save_needs(path: str | Path, needs: Needs, about: Mapping[str, Any]) -> None:
    """Write needs as JSON, whole or not at all.

    Args:
        path: The file.
        needs: What was measured.
        about: On what and with what, for the reader: it is not read back.

    Raises:
        OSError: It can't be written.
    """
    losses = [[[float(f"{x:.4g}") for x in head] for head in layer] for layer in needs.losses]
    content = {"format": FORMAT, "model": needs.model, "about": dict(about), "budgets": list(needs.budgets)}
    write_json(Path(path), content | {"losses": losses})


def packaged_needs(identity: str) -> Needs | None:
    """Find the needs of a model among those that the package carries, by ``needs_identity``; None if it has none."""
    return next((needs for needs in packaged() if needs.model == identity), None)


def packaged() -> list[Needs]:
    """Read all needs that the package carries."""
    folder = files("h2o_mlxlm") / "needs"
    names = sorted(f.name for f in folder.iterdir() if f.name.endswith(".json")) if folder.is_dir() else []
    return [_read((folder / name).read_text(encoding="utf-8")) for name in names]


def needs_for(model: Any, needs: Needs | None = None) -> Needs:
    """Find what was measured of a model: what is given, or what the package carries.

    Raises:
        TypeError: They are no ``Needs``.
        ValueError: They are of another model, or the package carries nothing of this one.
    """
    if not isinstance(needs, Needs | None):
        raise TypeError(f"needs must be Needs, as load_needs returns them, got {needs!r:.200}")
    own = needs_identity(model)
    if needs is None:
        needs = packaged_needs(own)
        if needs is None:
            raise ValueError(
                "no needs of this model's heads come with h2o_mlxlm: measure them with h2o-mlxlm calibrate --out DIR, "
                'and pass load_needs("DIR/needs.json"), --needs DIR/needs.json, or "calibrated DIR/needs.json" as the '
                "method"
            )
    if needs.model != own:
        raise ValueError(
            f"needs of heads were measured on model {needs.model!r}, and this one is {own!r}: calibrate this one"
        )
    return needs


def _read(text: str) -> Needs:
    try:
        content = _frozen(json.loads(text))
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict) or not {"format", "model", "budgets", "losses"} <= content.keys():
        _refuse("it is no JSON object with format, model, budgets and losses")
    if content["format"] != FORMAT:
        _refuse(f"its format is {content['format']!r:.40}, and this version reads {FORMAT}: calibrate anew")
    return Needs(content["model"], content["budgets"], content["losses"])


def _frozen(content: Any) -> Any:
    """Make a JSON object's lists tuples, within one another."""
    if isinstance(content, dict):
        return {name: _frozen(value) for name, value in content.items()}
    return tuple(map(_frozen, content)) if isinstance(content, list) else content


def _check_budgets(budgets: Any) -> None:
    known = isinstance(budgets, tuple) and 2 <= len(budgets) <= 64 and all(is_whole(b, 1, MOST_TOKENS) for b in budgets)
    if not known or list(budgets) != sorted(set(budgets)):
        _refuse(f"budgets must be a tuple of 2 to 64 whole numbers of tokens, ascending, got {budgets!r:.80}")


def _check_losses(losses: Any, n_budgets: int) -> None:
    layers = losses if isinstance(losses, tuple) else ()
    if not layers or not all(isinstance(layer, tuple) and layer for layer in layers):
        _refuse(f"losses must be a tuple of layers, each a tuple of heads, got {losses!r:.80}")
    if sum(map(len, layers)) > MOST_HEADS:
        _refuse(f"losses must be of at most {MOST_HEADS} heads, got {sum(map(len, layers))}")
    for number, layer in enumerate(layers):
        for place, head in enumerate(layer):
            if not isinstance(head, tuple) or len(head) != n_budgets or not all(map(_is_loss, head)):
                _refuse(
                    f"losses of a head must be a tuple of {n_budgets} numbers from 0 to {MOST_LOSS:g}, one for each "
                    f"budget, got {head!r:.80} in layer {number}, head {place}"
                )


def _is_loss(x: Any) -> bool:
    return type(x) in (int, float) and 0 <= x <= MOST_LOSS


def _refuse(what: str) -> NoReturn:
    raise ValueError(what)
