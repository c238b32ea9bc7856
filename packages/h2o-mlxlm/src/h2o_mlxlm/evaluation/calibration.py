"""What it costs to bound each KV head of a model alone, on windows of texts.

A window is ``context`` tokens and then ``scored`` ones. The context is read once, by caches from which nothing goes
yet, and then for each layer, head and budget a copy of them goes on: the context's last token goes alone, which is
when this one head is cut, and the scored ones in calls of some, since nothing goes before its call has seen it.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import mlx.core as mx

from h2o_core import H2OConfig
from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.evaluation import loss
from h2o_mlxlm.evaluation.bootstrap import mean
from h2o_mlxlm.evaluation.loss import Shape
from h2o_mlxlm.evaluation.passes import log_probabilities, numbers, read_but_last
from h2o_mlxlm.evaluation.replay import Handed
from h2o_mlxlm.evaluation.results import Rows
from h2o_mlxlm.identity import identity
from h2o_mlxlm.integration import make_prompt_cache
from h2o_mlxlm.needs import Needs
from h2o_mlxlm.split import SplitH2OKVCache
from h2o_mlxlm.suitability import check_ragged

COLUMNS = ("run", "text", "window", "layer", "head", "budget", "kl")
KEY = COLUMNS[:-1]
CALL = 64  # scored tokens of a call: a small one costs as much, for the model's weights have to be read


class Unit(NamedTuple):
    """What is run in one go: one head with one budget, on a batch of windows of one text."""

    text: str
    run: str
    first: int  # number of the first window
    windows: mx.array
    layer: int
    head: int
    budget: int

    def identities(self) -> list[dict[str, Any]]:
        """The identifying columns of its rows."""
        own = {name: getattr(self, name) for name in KEY if name != "window"}
        return [own | {"window": self.first + i} for i in range(len(self.windows))]


def heads_of(model: Any) -> list[int]:
    """Count the KV heads of each layer that gets an H2O cache, lowest first.

    Raises:
        ValueError: The model can't have heads of different budgets.
    """
    caches = make_prompt_cache(model, H2OConfig())
    check_ragged(model, caches, hooked=True)
    # Never evaluated: it tells the shapes of the model's keys.
    model(mx.zeros((1, 2), mx.int32), cache=caches)
    return [c.keys_and_values()[0].shape[1] for c in caches if isinstance(c, H2OKVCache)]


def run_of(model_id: str, text: str, windows: mx.array, shape: Shape) -> str:
    """Identify what rows must have in common; see ``loss.run_of``. Here a version's defaults are part of it."""
    return identity(loss.run_of(model_id, text, windows, shape), repr(H2OConfig()))


def units(
    texts: Mapping[str, mx.array], runs: Mapping[str, str], heads: Sequence[int], budgets: Sequence[int], shape: Shape
) -> Iterator[Unit]:
    """List everything to run, all heads on one batch of windows after another."""
    for text, windows in texts.items():
        for first in range(0, len(windows), shape.batch):
            for layer, n_heads in enumerate(heads):
                for head in range(n_heads):
                    for budget in budgets:
                        part = windows[first : first + shape.batch]
                        yield Unit(text, runs[text], first, part, layer, head, budget)


class Read:
    """Windows whose context has been read but for its last token, in caches that hold all of it.

    Args:
        model: The model.
        windows: int32 [B, context + scored].
        shape: How windows are read.
    """

    def __init__(self, model: Any, windows: mx.array, shape: Shape) -> None:
        self.model, self.windows, self.shape = model, windows, shape
        # A multiple of 4, so that heads that are cut have the recent window of their budget.
        self.unbounded = 4 * (windows.shape[1] // 4 + 1)
        self.caches = make_prompt_cache(model, H2OConfig(budget=self.unbounded, evict_during_prefill=False))
        read_but_last(model, self.caches, windows[:, : shape.context], shape.prefill_step_size)
        # Not mlx_lm's cache, whose sums are rounded otherwise: a head that loses nothing diverges by 0.
        caches, self.handed = copy.deepcopy(self.caches), Handed(model)
        with self.handed.recorded(caches):
            self.full = list(self._said(caches))

    def divergence(self, layer: int, head: int, budget: int) -> list[float]:
        """KL(full ‖ this head alone bounded) of each window, the mean over scored tokens, in nats."""
        caches = copy.deepcopy(self.caches)
        place = [i for i, c in enumerate(caches) if isinstance(c, H2OKVCache)][layer]
        budgets = [self.unbounded] * caches[place].keys_and_values()[0].shape[1]
        budgets[head] = budget
        caches[place] = SplitH2OKVCache.of(caches[place], budgets)
        total = mx.zeros(len(self.windows))
        with self.handed.replayed(place):
            for full, said in zip(self.full, self._said(caches), strict=True):
                total = total + (mx.exp(full) * (full - said)).sum(axis=(1, 2))
                mx.eval(total)
        found: list[float] = numbers(total / self.shape.scored)
        return found

    def _said(self, caches: list[Any]) -> Iterator[mx.array]:
        """Log-probabilities [B, n, V] of the scored tokens, call by call."""
        context, last = self.shape.context, self.windows.shape[1] - 1
        for start, end in pairwise([context - 1, *range(context, last, CALL), last]):
            said = log_probabilities(self.model(self.windows[:, start:end], cache=caches))
            mx.eval(said)
            yield said


def measure(
    model: Any, todo: Sequence[Unit], rows: Rows, shape: Shape, done: Callable[[], object] = lambda: None
) -> None:
    """Run what has no rows yet; the rows of a unit are written as soon as it is through.

    Args:
        model: The model.
        todo: From ``units``.
        rows: Where rows go.
        shape: How windows are read.
        done: Called after each unit.
    """

    def figures(unit: Unit, read: Read) -> list[dict[str, Any]]:
        return [{"kl": kl} for kl in read.divergence(unit.layer, unit.head, unit.budget)]

    loss.run_units(todo, rows, lambda unit: Read(model, unit.windows, shape), figures, done)


def needs_of(model_id: str, todo: Sequence[Unit], rows: Rows) -> Needs:
    """Put together what was measured.

    Args:
        model_id: What ``needs_identity`` says of the model.
        todo: All units; they have their rows.
        rows: Where these are.

    Raises:
        ValueError: On some text the middle budget costs nothing in any head.
    """
    budgets = tuple(sorted({unit.budget for unit in todo}))
    places = sorted({(unit.layer, unit.head) for unit in todo})
    shares = [_shares([u for u in todo if u.run == run], rows, budgets) for run in dict.fromkeys(u.run for u in todo)]
    each = {place: tuple(mean([share[*place, b] for share in shares]) for b in budgets) for place in places}
    layers = range(places[-1][0] + 1)
    return Needs(model_id, budgets, tuple(tuple(each[p] for p in places if p[0] == layer) for layer in layers))


def _shares(todo: Sequence[Unit], rows: Rows, budgets: Sequence[int]) -> dict[tuple[int, int, int], float]:
    """Losses of one text by layer, head and budget, as shares of what the middle budget costs in all heads."""
    found: dict[tuple[int, int, int], list[float]] = {}
    for unit in todo:
        # Where nothing is lost, rounding alone says more or less than 0.
        losses = [max(0.0, float(rows.find(key)["kl"])) for key in unit.identities()]
        found.setdefault((unit.layer, unit.head, unit.budget), []).extend(losses)
    middle = budgets[len(budgets) // 2]
    total = sum(mean(losses) for (_, _, budget), losses in found.items() if budget == middle)
    if not total > 0:
        raise ValueError(
            f"text {todo[0].text!r} loses nothing with any head at {middle} tokens: give more --context, or smaller "
            "--budgets"
        )
    return {place: mean(losses) / total for place, losses in found.items()}
