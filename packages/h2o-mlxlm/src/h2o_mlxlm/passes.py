"""Forward passes: all layers of a model take part in each, in turn, or the caches no longer belong together."""

import copy
import weakref
from collections.abc import Sequence
from typing import Any, NoReturn


class Passes:
    """What the caches of one model's layers share, to notice a pass that an exception has ended half-way.

    Then some layers have seen a token that others have not, and nothing that follows would be right. A cache on
    its own, a copy of one, and one that has been batched or restored share this with no other.

    Args:
        newest: Passes so far.
        others: mlx_lm's caches of the model's other layers that count tokens in ``offset``.
    """

    def __init__(self, newest: int = 0, others: Sequence[Any] = ()) -> None:
        self.newest = newest
        # Not held: a cache of ours that is copied by itself leaves them behind, and their copies would stand still.
        self._others = [weakref.ref(c) for c in others]

    def __deepcopy__(self, memo: dict[int, Any]) -> "Passes":
        # Caches that are copied together have these copies among them.
        return Passes(self.newest, [copy.deepcopy(c, memo) for c in self._there()])

    def enter(self, passes: int, before: int, after: int) -> int:
        """Let a layer begin its next pass.

        Args:
            passes: How many it has begun before.
            before: Tokens it has seen in them.
            after: Tokens it will have seen.

        Returns:
            The number of the pass.

        Raises:
            RuntimeError: Other layers have been in passes that this one has not, or the other way round.
        """
        number = passes + 1
        # The first layer to come begins a pass, the others join it.
        if self.newest == passes:
            # Of mlx_lm's layers some may have been in this pass already.
            if not all(before <= c.offset <= after for c in self._there()):
                _raise_interrupted()
            self.newest = number
        if self.newest != number:
            _raise_interrupted()
        return number

    def _there(self) -> list[Any]:
        return [c for c in [ref() for ref in self._others] if c is not None]


def _raise_interrupted() -> NoReturn:
    raise RuntimeError(
        "the layers of this model have seen different tokens, because a call was interrupted between them by an "
        "exception: what follows would be wrong; start from a fresh cache, or from a copy made earlier"
    )
