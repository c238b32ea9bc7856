"""The published variants: as configurations where ours can be one, as naive oracles in any case.

An oracle is a loop over one head's rows in Python floats, written from the text, that shares no code with the
package. ``rows[t][p]`` is the attention of step t to token p ≤ t with nothing evicted; what an oracle's cache holds
is that row over the tokens held, renormalised. Each returns the positions held after every step, ascending.

Source:
    Zhang et al., H2O (arXiv 2306.14048): section 4.1 global and local statistics, section 4.2 and Algorithm 1 the
    eviction; the authors' programs at github.com/FMInference/H2O, named where they differ.
"""

import math
from collections.abc import Callable, Sequence

from h2o_core.config import H2OConfig

Matrix = Sequence[Sequence[float]]


def algorithm_1(budget: int) -> H2OConfig:
    """Algorithm 1: plain sums of attention, nobody protected, one out for one in.

    As the paper's definitions have it, a query attends to its own token, so a token starts with its own mass.
    The listing's lines 8 and 9 leave it out: ``from_zero`` is that reading.

    >>> algorithm_1(64).grace, algorithm_1(64).decay
    (0, 1.0)
    """
    return H2OConfig(budget=budget, n_sink=0, grace=0, decay=1.0, long_share=0.0)


def text_generation(budget: int) -> H2OConfig:
    """The halves of the authors' text generation: as many heavy hitters as recent tokens.

    The prompt is attended to in full and pruned once, whatever the calls that bring it.
    """
    return H2OConfig(budget=budget, n_sink=0, grace=budget // 2, decay=1.0, long_share=0.0, evict_during_prefill=False)


def overwriting(budget: int) -> H2OConfig:
    """The authors' FlexGen: ``budget`` slots, the new token's row written over the lowest before it attends.

    That token is the one our cache let go at the end of the step before, so it is ours with a budget of one less.
    """
    return H2OConfig(budget=budget - 1, n_sink=0, grace=0, decay=1.0, long_share=0.0)


VARIANTS: dict[str, Callable[[int], H2OConfig]] = {
    "algorithm-1": algorithm_1,
    "text-generation": text_generation,
    "overwriting": overwriting,
}
"""By the names that the command line takes, as functions of the budget."""


def algorithm_1_oracle(rows: Matrix, budget: int) -> list[list[int]]:
    """S_i ← S_{i−1} ∪ {i} \\ {u}, u whose going leaves the largest sum of scores (Algorithm 1, line 12)."""
    kept: set[int] = set()
    score: dict[int, float] = {}
    history = []
    for i, row in enumerate(rows):
        candidates = kept | {i}
        for p, o in _softmax_over(row, candidates).items():
            score[p] = score.get(p, 0.0) + o
        if len(candidates) > budget:
            # Of several such u the earliest, our rule; the paper names none.
            u = max(sorted(candidates), key=lambda v: math.fsum(score[s] for s in candidates if s != v))
            candidates.remove(u)
        kept = candidates
        history.append(sorted(kept))
    return history


def from_zero_oracle(rows: Matrix, budget: int, n_sink: int = 0, grace: int = 0, decay: float = 1.0) -> list[list[int]]:
    """Algorithm 1 as listed (lines 8 and 9): o_i is over S_{i−1}, so a new token's score starts at 0.

    With ``n_sink``, ``grace`` and ``decay`` it is the rule of this project's seed, whose recent window is the rows
    that came last and whose ties go to the lowest position. No configuration of ours: a score of 0 is no measurement.
    """
    score: dict[int, float] = {}
    history = []
    for i, row in enumerate(rows):
        attention = _softmax_over(row, set(score))
        score = {p: s * decay + attention[p] for p, s in score.items()} | {i: 0.0}
        if len(score) > budget:
            order = sorted(score)
            may_go = order[n_sink : len(order) - grace]
            del score[min(may_go, key=lambda p: score[p])]
        history.append(sorted(score))
    return history


def text_generation_oracle(rows: Matrix, heavy: int, recent: int, prompt_len: int) -> list[list[int]]:
    """The authors' cache that really drops rows: after each call the ``heavy`` best of all but the last ``recent``.

    The prompt is one call. Before its end nothing has been dropped, and the lists hold every token.
    """
    kept: list[int] = []
    score: dict[int, float] = {}
    history = []
    for t, row in enumerate(rows):
        kept = [*kept, t]
        score[t] = 0.0
        for p, o in _softmax_over(row, set(kept)).items():
            score[p] += o
        if t >= prompt_len - 1 and len(kept) > heavy + recent:
            older, newer = kept[: len(kept) - recent], kept[len(kept) - recent :]
            # Of equal scores the later stays, our rule; the authors' topk names none.
            best = sorted(older, key=lambda p: (score[p], p))[len(older) - heavy :]
            kept = sorted(best) + newer
        history.append(list(kept))
    return history


def overwriting_oracle(rows: Matrix, budget: int) -> list[list[int]]:
    """Slots that are written over: token t takes the slot of the lowest sum, then attends."""
    slots: list[tuple[int, float]] = []
    history = []
    for t, row in enumerate(rows):
        if len(slots) == budget:
            slots.remove(min(slots, key=lambda slot: (slot[1], slot[0])))
        slots.append((t, 0.0))
        attention = _softmax_over(row, {p for p, _ in slots})
        slots = [(p, s + attention[p]) for p, s in slots]
        history.append(sorted(p for p, _ in slots))
    return history


def hidden_step_oracle(rows: Matrix, heavy: int, recent: int) -> list[list[int]]:
    """The masks of the authors' simulation, which hide a token in the step after it leaves the recent window.

    The mask of step t + 1 shows the last ``recent`` of t + 2 tokens, but the heavy ones are chosen among all but
    the last ``recent`` of t + 1: token t + 1 − recent is in neither. Its score is kept, so it can come back. The list
    of step t is what step t attended to, its own token included.
    """
    score: dict[int, float] = {}
    shown = {0}
    history = []
    for t, row in enumerate(rows):
        history.append(sorted(shown))
        attention = _softmax_over(row, shown)
        score = {p: score.get(p, 0.0) + attention.get(p, 0.0) for p in range(t + 1)}
        shown = set(range(t + 2))
        if t + 1 > heavy + recent:
            choice = sorted(range(t + 1 - recent), key=lambda p: (score[p], p), reverse=True)[:heavy]
            shown = set(choice) | set(range(t + 2 - recent, t + 2))
            kept = shown | set(range(t + 1 - recent, t + 1))
            score = {p: s if p in kept else 0.0 for p, s in score.items()}
    return history


def look_ahead_oracle(rows: Matrix, budget: int) -> list[list[int]]:
    """The global statistics of section 4.1: the best of the tokens so far by all rows' attention, later ones too.

    The paper's yardstick for the local rule; a cache can't know it, and tokens come back.
    """
    total = [math.fsum(row[p] for row in rows[p:]) for p in range(len(rows))]
    return [sorted(sorted(range(t + 1), key=lambda p: (total[p], p), reverse=True)[:budget]) for t in range(len(rows))]


def _softmax_over(row: Sequence[float], held: set[int]) -> dict[int, float]:
    """The row over the tokens held, renormalised; all 0 if they have none of it."""
    total = math.fsum(row[p] for p in held)
    return {p: row[p] / total if total > 0 else 0.0 for p in sorted(held)}
