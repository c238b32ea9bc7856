"""What is counted for each sequence, before and after a call. Plain Python: a count is never waited for."""

from typing import NamedTuple

from h2o_core import H2OConfig


class Count(NamedTuple):
    """One sequence, in any head."""

    seen: int = 0  # tokens seen
    kept: int = 0  # rows once the call has ended
    largest: int = 0  # tokens of the largest call
    holding: bool = False  # nothing goes yet
    rolling: bool = False  # stored keys are unrotated

    @property
    def place(self) -> int:
        """Where the next token is rotated to."""
        return self.kept if self.rolling else self.seen

    def after(self, config: H2OConfig, n_tokens: int, whole: int) -> "Count":
        """Count so many real tokens of a call of ``whole``; none at all changes nothing."""
        if whole == 1 and self.kept == config.budget and config.trained_length is None:
            # What most calls do, in a step that every layer takes.
            return Count(self.seen + 1, self.kept, self.largest, False, self.rolling)
        if not n_tokens:
            return self
        # Up to rewind + 1 tokens may be handed in where otherwise one is: they are decoding, and may come next.
        seen, kept, largest = self.seen + n_tokens, self.kept + n_tokens, max(self.largest, whole, config.rewind + 1)
        holding = self.holding and whole > config.rewind + 1
        kept = kept if holding else min(kept, config.budget)
        return Count(seen, kept, largest, holding, self.rolling or outgrown(config, seen + largest))


Counts = tuple[Count, ...]
"""One for each sequence. A cache that was never batched has one for all of them: they have equal lengths."""


def outgrown(config: H2OConfig, length: int) -> bool:
    """Say whether positions up to ``length`` are more than the model was trained for."""
    return config.trained_length is not None and length > config.trained_length


class Part(NamedTuple):
    """Where a call that goes in parts has come to."""

    whole: int  # tokens of the call
    places: tuple[int, ...]  # where the model has rotated the part's first token to, in each sequence


class Call(NamedTuple):
    """A call of N tokens, some of them padding on the right; or a part of one."""

    n_tokens: int  # N
    lengths: tuple[int, ...] | None  # real tokens of each sequence; None if all are
    before: Counts
    after: Counts
    ahead: tuple[int, ...]  # how far each sequence's tokens are rotated beyond its place, for rows went meanwhile

    @property
    def most(self) -> int:
        """Rows per head before the call, of the sequence that has the most."""
        return max([c.kept for c in self.before])

    @property
    def real(self) -> tuple[int, ...]:
        """Real tokens of each sequence."""
        return self.lengths or (self.n_tokens,) * len(self.before)

    @property
    def over(self) -> tuple[bool, ...]:
        """The sequences of which some rows go."""
        return tuple([b.kept + n > a.kept for b, n, a in zip(self.before, self.real, self.after, strict=True)])

    @property
    def losing_one(self) -> tuple[bool, ...]:
        """The sequences of which a token came alone and one row goes for it."""
        if self.n_tokens > 1:
            return (False,) * len(self.before)
        return tuple([b.kept + n - a.kept == 1 for b, n, a in zip(self.before, self.real, self.after, strict=True)])

    @property
    def turning(self) -> tuple[bool, ...]:
        """The sequences whose keys are stored unrotated from the end of the call on."""
        return tuple([a.rolling and not b.rolling for b, a in zip(self.before, self.after, strict=True)])

    @property
    def is_even(self) -> bool:
        """Say whether all sequences have the same rows, tokens and evictions."""
        return (
            self.lengths is None and len({(b.kept, a.kept) for b, a in zip(self.before, self.after, strict=True)}) == 1
        )


def called(
    config: H2OConfig,
    counts: Counts,
    n_tokens: int,
    to_come: tuple[int, ...] | None = None,
    part: Part | None = None,
) -> tuple[Call, tuple[int, ...] | None]:
    """Count a call.

    Args:
        config: Budget, whether prefill evicts, trained length.
        counts: The sequences before it.
        n_tokens: N.
        to_come: Real tokens that each sequence still has in a prompt padded on the right; None without padding.
        part: What these tokens are a part of; None if they are the whole call.

    Returns:
        The call, and what is to come after it.

    Raises:
        RuntimeError: The padded prompt is over, but nobody said so.
    """
    lengths = None
    if to_come is not None:
        if not any(to_come):
            raise RuntimeError("all real tokens of the padded prompt have been seen: call finalize() before more come")
        lengths = tuple(min(n, n_tokens) for n in to_come)
        to_come = tuple(n - m for n, m in zip(to_come, lengths, strict=True))
        lengths = None if min(lengths) == n_tokens else lengths
    real = lengths or (n_tokens,) * len(counts)
    after = tuple([c.after(config, n, n if part is None else part.whole) for c, n in zip(counts, real, strict=True)])
    ahead = (0,) * len(counts)
    if part is not None:
        ahead = tuple([place - c.place for place, c in zip(part.places, counts, strict=True)])
    return Call(n_tokens, lengths, counts, after, ahead), to_come
