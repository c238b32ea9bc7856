"""Which head gets which budget, by what each would lose with it. Plain Python: no arrays."""

import math
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import combinations

Costs = Sequence[Sequence[float]]
"""What each of several heads, or groups of heads, loses at each level."""


def assigned(layers: Sequence[Costs], tokens: Sequence[int], total: int, groups: int) -> list[list[int]]:
    """Give each head a budget, for a total of at most ``total``, with at most so many different ones in a layer.

    First heads are raised one by one, see ``_raised``. Where a layer ends up with more than ``groups`` budgets, heads
    whose budgets are close by ratio are put together, and what was put together is raised anew, as one.

    Args:
        layers: For each layer and head, the loss at each level.
        tokens: Of each level, ascending.
        total: Tokens of all heads; enough for the lowest level.
        groups: Different budgets in one layer, at least 1.

    Returns:
        Tokens, by layer and head.
    """
    heads = [head for layer in layers for head in layer]
    levels = iter(_raised(heads, [1] * len(heads), tokens, total))
    found = [[next(levels) for _ in layer] for layer in layers]
    if any(len(set(layer)) > groups for layer in found):
        parts = [(number, part) for number, layer in enumerate(found) for part in _parts(layer, tokens, groups)]
        costs = [[sum(loss) for loss in zip(*[layers[n][h] for h in part], strict=True)] for n, part in parts]
        again = _raised(costs, [len(part) for _, part in parts], tokens, total)
        for (number, part), level in zip(parts, again, strict=True):
            for head in part:
                found[number][head] = level
    return [[tokens[level] for level in layer] for layer in found]


def _raised(costs: Costs, sizes: Sequence[int], tokens: Sequence[int], total: int) -> list[int]:
    """Raise one after the other from the lowest level, always where most loss is saved for a token.

    Raises go to any higher level that fits, until none fits or none saves. Of equal ones the first comes first,
    by the fewest tokens.

    Args:
        costs: Of each group of heads.
        sizes: Heads of each.
        tokens: Of each level, for one head.
        total: Tokens of all heads.

    Returns:
        The level of each group.
    """
    at = [0] * len(costs)
    room = total - sum(sizes) * tokens[0]

    def raises(one: int) -> Iterator[tuple[float, int, int, int]]:
        start = at[one]
        for end in range(start + 1, len(tokens)):
            saved = costs[one][start] - costs[one][end]
            if saved > 0:
                yield -saved / (sizes[one] * (tokens[end] - tokens[start])), one, start, end

    best = [way for one in range(len(costs)) for way in raises(one)]
    heapify(best)
    while best:
        _, one, start, end = heappop(best)
        more = sizes[one] * (tokens[end] - tokens[start])
        # What does not fit never will: room only shrinks.
        if at[one] == start and more <= room:
            at[one], room = end, room - more
            for way in raises(one):
                heappush(best, way)
    return at


def _parts(levels: Sequence[int], tokens: Sequence[int], groups: int) -> list[list[int]]:
    """Put a layer's heads into at most ``groups`` parts of levels next to each other, as alike by ratio as can be."""
    used = sorted(set(levels))
    cuts = combinations(range(1, len(used)), min(groups, len(used)) - 1)
    divided = [[used[a:b] for a, b in zip((0, *cut), (*cut, len(used)), strict=True)] for cut in cuts]

    def spread(part: Sequence[int]) -> float:
        logs = [math.log(tokens[level]) for level in levels if level in part]
        return sum((x - sum(logs) / len(logs)) ** 2 for x in logs)

    best = min(divided, key=lambda parts: sum(map(spread, parts)))
    return [[head for head, level in enumerate(levels) if level in part] for part in best]
