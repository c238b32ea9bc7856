"""Replay an attention trace through a configuration: what would have been kept, and what it received."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, repeat
from typing import NamedTuple

import mlx.core as mx

from h2o_core._shapes import Float, Float32, Int32
from h2o_core.config import H2OConfig
from h2o_core.eviction import evict, release, victims
from h2o_core.evidence import Evidence
from h2o_core.rows import Recording, Rows, rows_of
from h2o_core.scoring import observe
from h2o_core.showing import attended, check, completed, continued
from h2o_core.state import EMPTY, H2OState, admit, grow, init, occupied

_STEP = 64  # slots added at a time while the budget is not reached


class Trace(NamedTuple):
    """What a replay saw. H KV heads, T steps; with a batch the first three arrays have a leading B axis."""

    kept: Int32[mx.array, "*b T H K"] | None  # positions held after each step, ascending, EMPTY behind them
    retained: Float32[mx.array, "*b T H"]  # share of the step's row that fell on tokens held
    evicted: Int32[mx.array, "*b T H"]  # the position that went in that step, EMPTY if none
    state: H2OState  # after the last step, always with its B axis


def simulate(
    attention: Float[mx.array, "*b Hq T T"] | Iterable[mx.array] | Recording,
    config: H2OConfig,
    prompt_len: int = 1,
    n_kv_heads: int | None = None,
    keep_positions: bool = True,
    chunk: int | Sequence[int] = 1,
    inputs: Mapping[str, mx.array] | None = None,
    recorded: Recording | None = None,
) -> Trace:
    """Replay recorded attention through a bounded cache.

    The first ``prompt_len`` rows are one call, then the calls are what ``chunk`` says. The cache sees a query
    head's row restricted to the tokens that its KV head holds, the call's own included, and renormalised to 1,
    as a softmax over the held keys gives; a row whose held mass is 0 adds none.

    Args:
        attention: Probabilities, causal, each row summing to 1. Either all in one array, or ``Rows``, or any
            iterator over blocks of consecutive rows, [*b, Hq, n, W] with W at least the tokens so far, of which
            one is in memory at a time. How it is cut into blocks plays no part. Or a ``Recording``, which has the
            queries, keys and values that some scorers need.
        config: The cache to simulate. Its ``queries``, ``positions`` and ``rewind`` play no part: the attention is
            given. Nor does it change when a scorer merges values.
        prompt_len: Rows of the first call, 1 to T.
        n_kv_heads: H, a divisor of Hq; None for the recording's, else for one KV head per query head.
        keep_positions: False leaves ``Trace.kept`` out, which grows with T.
        chunk: Rows of each call after the prompt, the last of which may have fewer; or a list of the first
            calls' rows, after which each row is a call.
        inputs: What the configuration's scorer needs of the caller, by name.
        recorded: The recording that ``attention`` was made from, where that is an iterator.

    Returns:
        The trace. Within a call of several tokens there are no steps, so its rows have ``kept`` only
        at the last and no ``evicted``. With ``evict_during_prefill=False``, ``kept`` is EMPTY while more
        than ``budget`` tokens are held, and so is ``evicted`` where several go at once.

    Raises:
        ValueError: A shape, ``prompt_len``, ``chunk`` or ``n_kv_heads`` does not fit, or the scorer needs what is not
            given.

    >>> trace = simulate(mx.tri(8)[None] / mx.arange(1, 9)[:, None], H2OConfig(4, n_sink=1, grace=1))
    >>> trace.kept[-1, 0].tolist()
    [0, 1, 2, 7]
    """
    if isinstance(attention, Recording):
        recorded = attention
    check(config.scorer, recorded, inputs)
    if n_kv_heads is None and recorded is not None:
        n_kv_heads = recorded.heads
    if isinstance(attention, (mx.array, Rows, Recording)):
        attention = rows_of(attention)
        _check_whole(attention.shape, prompt_len)
    sizes = _call_sizes(prompt_len, chunk)
    replay: _Replay | None = None
    for block in attention:
        if replay is None:
            replay = _Replay(config, block, sizes, n_kv_heads, keep_positions)
            replay.recorded, replay.inputs = recorded, inputs
        replay.read(block)
    if replay is None:
        raise ValueError("attention must have at least one row, got none")
    _check_prompt(prompt_len, replay.seen)
    return replay.finished()


class _Replay:
    """A replay under way: the state, the call that is open, and what has been seen."""

    def __init__(
        self, config: H2OConfig, block: mx.array, sizes: Iterator[int], n_kv_heads: int | None, keep_positions: bool
    ) -> None:
        if block.ndim not in (3, 4):
            raise ValueError(f"a block of rows must be [Hq, n, W] or [B, Hq, n, W], got shape {block.shape}")
        self.config, self.sizes, self.keep_positions = config, sizes, keep_positions
        self.squeeze = block.ndim == 3
        self.batch, self.n_query_heads = (1, *block.shape)[-4:-2]
        self.n_heads = self.n_query_heads if n_kv_heads is None else n_kv_heads
        _check_heads(self.n_query_heads, self.n_heads)
        self.state = init(self.batch, self.n_heads, scorer=config.scorer)
        self.recorded: Recording | None = None
        self.inputs: Mapping[str, mx.array] | None = None
        self.evidence: Evidence | None = None  # of the open call
        self.held = self.seen = self.of_call = 0  # rows: in each head, in all, in the open call
        self.left = next(sizes)  # rows that the open call still wants
        self.holding = not config.evict_during_prefill
        self.kept: list[mx.array] = []
        self.retained: list[mx.array] = []
        self.evicted: list[mx.array] = []

    def read(self, block: mx.array) -> None:
        """Read a block of rows, ending calls where they end."""
        n, width = block.shape[-2:]
        expected = (self.n_query_heads, n) if self.squeeze else (self.batch, self.n_query_heads, n)
        if block.shape[:-1] != expected or width < self.seen + n:
            raise ValueError(
                f"a block of rows must be [{', '.join(map(str, expected))}, W] with W at least "
                f"{self.seen + n}, the tokens so far, got shape {block.shape}"
            )
        rows = block.astype(mx.float32).reshape(self.batch, self.n_heads, -1, n, width)
        at = 0
        while at < n:
            m = min(n - at, self.left)
            self._observe(rows[:, :, :, at : at + m])
            at += m
            if not self.left:
                self._end_call()
                self.left = next(self.sizes)

    def finished(self) -> Trace:
        """End the last call, which may have fewer rows than it wanted."""
        if self.of_call:
            self._end_call()
        kept = self._joined(self.kept) if self.keep_positions else None
        return Trace(kept, self._joined(self.retained), self._joined(self.evicted), self.state)

    def _joined(self, steps: list[mx.array]) -> mx.array:
        joined = mx.concatenate(steps, axis=1)
        steps.clear()
        mx.eval(joined)
        return joined[0] if self.squeeze else joined

    def _observe(self, rows: Float32[mx.array, "B H G N W"]) -> None:
        """Attend with rows of the open call. Nothing goes before it ends, so its rows may come in parts."""
        m = rows.shape[3]
        if m == 1 and self.held == self.state.positions.shape[-1]:
            self.state = grow(self.state, self.held + _STEP if self.held < self.config.budget else self.held + 1)
        self.state, _ = admit(self.state, m)
        part, share = attended(self.config, self.state, rows)
        self.evidence = part if self.evidence is None else continued(self.config, self.evidence, part, m)
        self.retained.append(share.swapaxes(1, 2))
        self.held, self.seen, self.of_call, self.left = self.held + m, self.seen + m, self.of_call + m, self.left - m
        mx.eval(self.state, self.retained[-1], self.evidence)

    def _end_call(self) -> None:
        n, scorer, evidence = self.of_call, self.config.scorer, self.evidence or Evidence()
        evidence = completed(scorer, evidence, self.state, n, self.seen, self.recorded, self.inputs)
        before = self.state = observe(self.config, self.state, evidence, n)
        self.holding = self.holding and n > 1
        if not self.holding and self.held > self.config.budget:
            self.state, self.held = _bounded(self.config, self.state), self.config.budget
        gone = _only_gone(before, self.state, n)[:, None]
        self._log(self.evicted, gone, n)
        if self.keep_positions:
            self._log(self.kept, _held(self.config, self.state, self.held)[:, None], n)
        self.of_call, self.evidence = 0, None
        mx.eval(self.state, self.evicted[-1], self.kept[-1:])

    def _log(self, steps: list[mx.array], last: mx.array, n: int) -> None:
        """Note what was so after the call's last row; before it there was nothing to note."""
        if n > 1:
            steps.append(mx.full((self.batch, n - 1, *last.shape[2:]), EMPTY, mx.int32))
        steps.append(last)


def _bounded(config: H2OConfig, state: H2OState) -> H2OState:
    """The state with at most ``budget`` tokens per head."""
    if state.positions.shape[-1] > config.budget + 1:
        return evict(config, state)[0]
    return release(config, state, victims(config, state))


def _held(config: H2OConfig, state: H2OState, n_held: int) -> Int32[mx.array, "B H K"]:
    """Positions held, ascending, EMPTY behind; all EMPTY while more than ``budget`` are held."""
    missing = config.budget - n_held
    if missing < 0:
        return mx.full((*state.positions.shape[:2], config.budget), EMPTY, mx.int32)
    # Empty slots come first in order.
    ordered = mx.sort(state.positions, axis=-1)[..., state.positions.shape[-1] - n_held :]
    return mx.pad(ordered, [(0, 0), (0, 0), (0, missing)], constant_values=mx.array(EMPTY, mx.int32))


def _only_gone(before: H2OState, after: H2OState, n: int) -> Int32[mx.array, "B H"]:
    """The position that went, if exactly one did in a call of one token; else EMPTY."""
    if n > 1 or before is after:
        return mx.full(before.positions.shape[:2], EMPTY, mx.int32)
    gone = occupied(before).sum(axis=-1) - occupied(after).sum(axis=-1)
    total = _position_sum(before) - _position_sum(after)
    return mx.where(gone == 1, total, EMPTY).astype(mx.int32)


def _position_sum(state: H2OState) -> mx.array:
    return mx.maximum(state.positions, 0).astype(mx.int64).sum(axis=-1)


def _call_sizes(prompt_len: int, chunk: int | Sequence[int]) -> Iterator[int]:
    sizes = [chunk] if isinstance(chunk, int) else list(chunk)
    if not all(isinstance(n, int) and n >= 1 for n in sizes):
        raise ValueError(f"chunk must be a number of rows, or a list of them, each at least 1, got {chunk!r}")
    # At least 1: whether the prompt fits is known when the rows have been counted.
    return chain([max(1, prompt_len)], repeat(chunk) if isinstance(chunk, int) else chain(sizes, repeat(1)))


def _check_whole(shape: tuple[int, ...], prompt_len: int) -> None:
    if len(shape) not in (3, 4) or shape[-1] != shape[-2] or shape[-1] == 0:
        raise ValueError(f"attention must be [Hq, T, T] or [B, Hq, T, T] with T at least 1, got shape {shape}")
    _check_prompt(prompt_len, shape[-1])


def _check_prompt(prompt_len: int, n_steps: int) -> None:
    if not 1 <= prompt_len <= n_steps:
        raise ValueError(f"prompt_len must be between 1 and T={n_steps}, got {prompt_len}")


def _check_heads(n_query_heads: int, n_heads: int) -> None:
    if n_heads < 1 or n_query_heads % n_heads:
        raise ValueError(f"n_kv_heads must divide the {n_query_heads} query heads, got {n_heads}")
