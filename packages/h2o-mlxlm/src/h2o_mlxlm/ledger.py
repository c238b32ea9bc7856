"""The scores of all layers of a model, kept in one go while every call has one token."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import mlx.core as mx

from h2o_core import H2OConfig, H2OState, Mass, admit, observe, victims
from h2o_mlxlm.slots import CONFIGURATIONS


class Step(NamedTuple):
    """What a layer's last call of one token has left to do: its mass is to be scored, and one row goes."""

    config: H2OConfig
    state: H2OState
    mass: mx.array  # float32 [B, H, C]; of one query, the decayed one and the total are the same


class Ledger:
    """Ends such calls and gives slots to the next token's rows, for all layers when the first one asks.

    On one layer's scores, which are small, starting an operation takes longer than its work. The layers of one model
    share a ledger. It holds nothing that their caches don't, and what it has is compared by identity, so that a
    cache that has changed meanwhile, or a copy, is only slower.
    """

    def __init__(self) -> None:
        self._left: dict[int, Step] = {}
        self._done: dict[int, tuple[Step, H2OState, mx.array]] = {}

    def leave(self, layer: int, step: Step) -> None:
        """Note what is left to do in a layer."""
        self._left[layer] = step

    def __deepcopy__(self, memo: object) -> "Ledger":
        # Caches that are copied together share the new one.
        return Ledger()

    def forget(self, layer: int) -> None:
        """Drop what is left to do in a layer: somebody has done it."""
        self._left.pop(layer, None)
        self._done.pop(layer, None)

    def turn(self, layer: int, step: Step) -> tuple[H2OState, mx.array]:
        """Do it: what ``observe``, ``victims`` and ``admit`` do, by the reference.

        Returns:
            The state with the next token admitted, and the slot of its row [B, H, 1], which is the victim's: the new
            row takes it as it is, so it need not be emptied first.
        """
        done = self._done.pop(layer, None)
        if done is None or not _same(done[0], step):
            self._left[layer] = step
            self._do(step)
            done = self._done.pop(layer)
        return done[1], done[2]

    def _do(self, like: Step) -> None:
        # Layers may differ in budgets and heads; the others have their turn when one of them asks.
        alike = {n: step for n, step in self._left.items() if _kind(step) == _kind(like)}
        self._left = {n: s for n, s in self._left.items() if n not in alike}
        made = _turn(like.config)([s.state for s in alike.values()], [s.mass for s in alike.values()])
        self._done |= {n: (step, *one) for (n, step), one in zip(alike.items(), made, strict=True)}


def _kind(step: Step) -> tuple[H2OConfig, tuple[int, ...]]:
    return step.config, step.state.scores.shape


def _same(a: Step, b: Step) -> bool:
    return a.state.scores is b.state.scores and a.mass is b.mass


@lru_cache(maxsize=CONFIGURATIONS)
def _turn(config: H2OConfig) -> Callable[[list[H2OState], list[mx.array]], list[tuple[H2OState, mx.array]]]:
    def turn(states: list[H2OState], masses: list[mx.array]) -> list[tuple[H2OState, mx.array]]:
        # Layers stand behind one another like the sequences of a batch.
        books = zip(*[(s.scores, s.totals, s.positions, s.seen) for s in states], strict=True)
        scores, totals, positions, seen = [mx.concatenate(list(x)) for x in books]
        state, mass = H2OState(scores, totals, positions, seen), mx.concatenate(masses)
        state = observe(config, state, Mass(mass, mass), 1)
        state, slots = admit(state, 1, slots=victims(config, state))
        parts = [mx.split(x, len(states)) for x in (*state[:4], slots)]
        return [(H2OState(*books), slots) for *books, slots in zip(*parts, strict=True)]

    return mx.compile(turn)
