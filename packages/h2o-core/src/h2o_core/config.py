"""What a user chooses. Plain Python: no arrays, no mlx."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from h2o_core.scorer import scorer_of

Queries = Literal["true", "key"]
Positions = Literal["original", "rolling", "auto"]


@dataclass(frozen=True)
class H2OConfig:
    """Say how many tokens each KV head keeps, and by what rule.

    Checked at construction, so that a cache never meets a setting it can't honour.

    Args:
        budget: Tokens kept per KV head, sinks and recent window included; at least 1.
        n_sink: Leading positions that are never evicted; at least 0.
        grace: Newest positions that are never evicted (the paper's recent window); at least 0. None is a
            quarter of ``budget``, and reads so afterwards. ``n_sink + grace`` must be below ``budget``.
        decay: Factor on every score per token seen, in (0, 1]; 1 is the paper's plain sum.
        long_share: Share of the places for heavy hitters, ``budget − n_sink − grace``, that go to the largest
            sums of attention without decay, in [0, 1]; the others go by score. With 0, or without decay,
            the scores alone decide. Old sums are hard to overtake, so a text without
            end wants 0.
        queries: Whose attention makes the mass: ``"true"`` the model's queries, ``"key"`` the
            incoming key standing in for them, which needs no hook in the model.
        positions: ``"original"`` keys keep the rotary position they arrived with; ``"rolling"`` the kept
            rows of a head always sit at consecutive positions right before the next query; ``"auto"``
            original for as long as the model was trained for, then rolling.
        evict_during_prefill: If False nothing is evicted, and the budget does not apply, until the
            first call of one token (of up to ``rewind + 1``) has been attended to, as in the paper.
        trained_length: Positions that the model was trained for, for ``positions="auto"`` alone; None takes
            the model's own. Above ``budget + rewind``.
        rewind: Newest tokens that a cache can take back (``trim``), from 0 to 64, for speculative decoding:
            as many as are drafted at a time. Needs ``queries="true"``. With it the last ``rewind`` tokens of a
            call come one by one, and a call of up to ``rewind + 1`` tokens is decoding.

    Raises:
        TypeError: A value is of the wrong kind.
        ValueError: A value is outside its range.

    Source:
        Zhang et al., H2O (arXiv 2306.14048), section 4; ``n_sink`` Xiao et al., StreamingLLM
        (arXiv 2309.17453); ``grace`` and ``decay`` are additions of this project's seed.

    >>> H2OConfig(budget=64).grace
    16
    >>> H2OConfig(budget=16, grace=16)
    Traceback (most recent call last):
        ...
    ValueError: n_sink + grace must be below budget, got n_sink=4, grace=16, budget=16: \
raise budget above 20 or lower n_sink or grace
    """

    budget: int = 512
    n_sink: int = 4
    grace: int = None  # type: ignore[assignment]  # an integer from __post_init__ on
    decay: float = 0.95
    long_share: float = 0.0
    queries: Queries = "true"
    positions: Positions = "original"
    evict_during_prefill: bool = True
    trained_length: int | None = None
    rewind: int = 0
    scorer: Any = "h2o"  # a Scorer from __post_init__ on

    def __post_init__(self) -> None:
        _check_count("budget", self.budget, least=1)
        _check_count("n_sink", self.n_sink, least=0)
        if self.grace is None:
            object.__setattr__(self, "grace", self.budget // 4)
        _check_count("grace", self.grace, least=0)
        if self.n_sink + self.grace >= self.budget:
            raise ValueError(
                f"n_sink + grace must be below budget, got n_sink={self.n_sink}, grace={self.grace}, "
                f"budget={self.budget}: raise budget above {self.n_sink + self.grace} "
                "or lower n_sink or grace"
            )
        _check_decay(self.decay)
        _check_share(self.long_share)
        _check_choice("queries", self.queries, get_args(Queries))
        _check_choice("positions", self.positions, get_args(Positions))
        if not isinstance(self.evict_during_prefill, bool):
            raise TypeError(f"evict_during_prefill must be True or False, got {self.evict_during_prefill!r}")
        _check_count("rewind", self.rewind, least=0, most=MOST_REWIND)
        if self.trained_length is not None:
            self._check_trained_length(self.trained_length)
        object.__setattr__(self, "scorer", scorer_of(self.scorer))
        self._check_scorer()
        if self.rewind:
            self._check_rewind()

    @property
    def n_long(self) -> int:
        """Places for the largest sums without decay."""
        return int(self.long_share * (self.budget - self.n_sink - self.grace))

    def _check_scorer(self) -> None:
        """Refuse what is set but would not be used."""
        name, defaults = self.scorer.name, type(self).__dataclass_fields__
        for setting in () if self.scorer.sums else ("decay", "long_share"):
            value, default = getattr(self, setting), defaults[setting].default
            if value != default:
                raise ValueError(
                    f"{setting} is for scorers that sum mass, and {name!r} does not, got {value}: leave it out"
                )
        if self.queries == "key" and self.scorer.needs & {"rows", "queries"}:
            raise ValueError(f'scorer {name!r} needs the model\'s own queries, got queries="key": leave it out')
        if self.queries == "key" and "mass" not in self.scorer.needs:
            raise ValueError(f'scorer {name!r} looks at no query, got queries="key": leave it out')

    def _check_rewind(self) -> None:
        """Refuse what can't take a token back."""
        name, rewind = self.scorer.name, self.rewind
        if self.queries == "key":
            raise ValueError(
                f'rewind needs queries="true", got rewind={rewind} with queries="key": a token that can be taken '
                "back is scored inside the model's attention; use rewind=0"
            )
        if self.scorer.merges:
            raise ValueError(
                f"scorer {name!r} merges values, which can't be taken apart again, got rewind={rewind}: use rewind=0"
            )
        if self.scorer.once:
            raise ValueError(
                f"scorer {name!r} takes a call of one token for the end of the prompt, got rewind={rewind}, with "
                "which the last tokens of every call come one by one: use rewind=0"
            )

    def _check_trained_length(self, length: int) -> None:
        _check_count("trained_length", length, least=1)
        if self.positions != "auto":
            raise ValueError(
                f'trained_length is for positions="auto" alone, got {length} with positions={self.positions!r}: '
                "leave it out"
            )
        if length <= self.budget + self.rewind:
            rewind, plus = (f"rewind={self.rewind}, ", " + rewind") if self.rewind else ("", "")
            raise ValueError(
                f'budget{plus} must be below trained_length for positions="auto", got budget={self.budget}, {rewind}'
                f"trained_length={length}: rolling positions go up to budget plus the tokens of a call"
            )


# Above this, int32 positions and slot arithmetic could overflow.
MOST_TOKENS = 2**30

# Each token that can be taken back costs a step of its own in every call, and memory.
MOST_REWIND = 64


def _check_count(name: str, value: object, least: int, most: int = MOST_TOKENS) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer number of tokens, got {value!r}")
    if not least <= value <= most:
        raise ValueError(f"{name} must be between {least} and {most} tokens, got {value}")


def _check_decay(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"decay must be a number in (0, 1], got {value!r}")
    if not 0 < value <= 1:
        raise ValueError(f"decay must be in (0, 1], got {value!r:.40}: 1 never forgets, smaller forgets faster")


def _check_share(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"long_share must be a number in [0, 1], got {value!r}")
    if not 0 <= value <= 1:
        raise ValueError(
            f"long_share must be in [0, 1], got {value!r:.40}: the share of heavy hitters kept for old sums"
        )


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
