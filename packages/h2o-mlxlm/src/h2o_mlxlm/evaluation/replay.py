"""What a model's layers are handed: known, it need not be computed again by the layers below.

mlx computes what is asked for. Where a layer is handed what it was handed before, nobody asks for what those below it
made of the same tokens: their caches go on, as graphs that are never evaluated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn


class Handed:
    """The first argument of each layer's calls, of layers that are handed the cache of their place with it.

    Args:
        model: The model. Its layers are as they were but while a context is open.
    """

    def __init__(self, model: Any) -> None:
        self.layers: list[nn.Module] = list(model.layers)
        self.inputs: list[list[mx.array]] = [[] for _ in self.layers]

    @contextmanager
    def recorded(self, caches: Sequence[Any]) -> Iterator[None]:
        """Record them while the model runs on these caches."""

        def note(place: int, x: mx.array, others: Sequence[Any]) -> mx.array:
            # Of another's cache it may be handed something that this place's cache changes.
            if any(other is caches[place] for other in others):
                self.inputs[place].append(x)
            return x

        with ExitStack() as stack:
            for place, layer in enumerate(self.layers):
                stack.enter_context(_tapped(layer, partial(note, place)))
            yield

    @contextmanager
    def replayed(self, place: int) -> Iterator[None]:
        """Hand a layer the same, call by call, whatever those below it make; without a record, what they make."""
        known = iter(self.inputs[place])
        with _tapped(self.layers[place], lambda x, others: next(known, x)):
            yield


@contextmanager
def _tapped(layer: nn.Module, tap: Callable[[Any, Sequence[Any]], Any]) -> Iterator[None]:
    """Let the first argument of a layer's calls go through ``tap``, which also sees the others."""
    kind: Any = type(layer)

    def call(self: Any, *args: Any, **named: Any) -> Any:
        first = [tap(x, [*args[1:], *named.values()]) for x in args[:1]]
        return kind.__call__(self, *first, *args[1:], **named)

    # Python looks for a call in the class, and lists of layers may be copies.
    layer.__class__ = type(kind.__name__, (kind,), {"__call__": call})
    try:
        yield
    finally:
        layer.__class__ = kind
