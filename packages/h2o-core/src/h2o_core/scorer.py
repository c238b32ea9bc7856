"""What a scorer is, and which there are by name. Plain Python: a scorer's arithmetic loads when it is chosen."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import mlx.core as mx

    from h2o_core.config import H2OConfig
    from h2o_core.evidence import Evidence
    from h2o_core.state import H2OState

SEEN = frozenset({"mass", "rows", "queries", "keys", "values", "random"})
"""What ``Scorer.needs`` may name that a cache sees by itself. Any other name is an input that the caller gives."""


@dataclass(frozen=True)
class Scorer:
    """Say what the scores of the kept rows are. Who goes is eviction's: the lowest of those that may.

    A method is a subclass: a frozen dataclass in a file of its own, its fields the parameters, numbers and words
    with defaults, so that a configuration can be hashed, and saved as JSON. It overrides ``name``, ``needs`` and
    ``observe``, and of the rest what it wants.

    Raises:
        TypeError: A parameter is of another kind than its default.
    """

    name: str = field(default="", init=False)

    def __post_init__(self) -> None:
        for known in fields(self):
            value = getattr(self, known.name)
            allowed = (int, float) if isinstance(known.default, float) else (type(known.default),)
            # True is an int to isinstance.
            if not isinstance(value, allowed) or isinstance(value, bool) != isinstance(known.default, bool):
                kinds = {int: "an integer", float: "a number", bool: "True or False", str: "a word"}
                kind = kinds.get(allowed[-1], allowed[-1].__name__)
                raise TypeError(f"{known.name} of scorer {self.name!r} must be {kind}, got {value!r}")

    @property
    def needs(self) -> frozenset[str]:
        """What ``observe`` reads of its evidence: names out of ``SEEN``, and the caller's inputs."""
        return frozenset()

    @property
    def inputs(self) -> frozenset[str]:
        """What the caller must give."""
        return self.needs - SEEN

    @property
    def by_attention(self) -> bool:
        """Say whether it looks at what the model's queries do; else a cache's own rows are all that it sees."""
        return bool(self.needs & {"mass", "rows", "queries"})

    @property
    def n_rows(self) -> int:
        """How many of the last queries' rows it reads at most, if it needs ``"rows"``."""
        return 0

    @property
    def extras(self) -> tuple[tuple[int, ...], ...]:
        """Shapes, for one slot, of what it keeps beside the scores, float32; 0 for a token that arrives."""
        return ()

    @property
    def sums(self) -> bool:
        """Say whether scores are sums of mass: then ``decay`` and ``long_share`` are for it, else they are refused."""
        return False

    @property
    def disturbs(self) -> bool:
        """Say whether its mass is that of probabilities which ``disturbed`` changed."""
        return False

    @property
    def merges(self) -> bool:
        """Say whether what goes leaves a part of its value behind, as ``shares`` says."""
        return False

    @property
    def once(self) -> bool:
        """Say whether a call of one token ends the prompt for good, so that it must not be cut into such calls."""
        return False

    @property
    def plain(self) -> bool:
        """Say whether scores are H2O's own, so that one kernel can do the whole step."""
        return self.sums and self.needs == {"mass"} and not (self.extras or self.disturbs or self.merges)

    def observe(
        self,
        config: "H2OConfig",
        state: "H2OState",
        evidence: "Evidence",
        n_tokens: int,
        lengths: "mx.array | None",
    ) -> "H2OState":
        """Give the state after a call its scores; ``h2o_core.observe`` has checked that the evidence is there.

        Args:
            config: Of which this is the scorer.
            state: After ``admit``.
            evidence: What the call showed, over all C slots.
            n_tokens: N.
            lengths: Real tokens of each sequence, int32 [B]; None if all are. A sequence with none stays as it is.
        """
        raise NotImplementedError(f"scorer {self.name!r} has no observe")

    def disturbed(self, p: "mx.array", queries: "mx.array", positions: "mx.array") -> "mx.array":
        """Change probabilities before they are summed.

        Args:
            p: float32 [B, H, G, n, C], as many queries at a time as memory allows.
            queries: Positions of the queries, int32 [B, n].
            positions: Positions of the slots, int32 [B, H, C].
        """
        raise NotImplementedError(f"scorer {self.name!r} disturbs nothing")

    def shares(self, state: "H2OState", victim: "mx.array") -> "mx.array":
        """Say how much of the victim's value each row's value gets, float32 [B, H, C].

        Args:
            state: After ``observe``, the victim still in it.
            victim: Its slot in each head, [B, H, 1].
        """
        raise NotImplementedError(f"scorer {self.name!r} merges nothing")

    def _check_range(self, name: str, least: float, most: float) -> None:
        value = getattr(self, name)
        if not least <= value <= most:
            raise ValueError(f"{name} of scorer {self.name!r} must be between {least} and {most}, got {value}")

    def _check_choice(self, name: str, allowed: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in allowed:
            raise ValueError(
                f"{name} of scorer {self.name!r} must be one of {', '.join(map(repr, allowed))}, got {value!r}"
            )


# In h2o_core.scorers, in a file of the scorer's name.
_OURS = {
    "cam": "CaM",
    "curdkv": "CurDKV",
    "expected_attention": "ExpectedAttention",
    "h2o": "H2O",
    "keydiff": "KeyDiff",
    "keyformer": "Keyformer",
    "kvzip": "KVzip",
    "l2norm": "L2Norm",
    "morphkv": "MorphKV",
    "qfilters": "QFilters",
    "scissorhands": "Scissorhands",
    "snapkv": "SnapKV",
    "streaming_llm": "StreamingLLM",
    "tova": "Tova",
}
_added: dict[str, type[Scorer]] = {}

S = TypeVar("S", bound=type[Scorer])


def register(kind: S) -> S:
    """Make a scorer of one's own known by its name; a decorator.

    Raises:
        ValueError: The name is taken, or there is none.
    """
    if not kind.name or kind.name in _OURS or _added.get(kind.name, kind) is not kind:
        raise ValueError(f"a scorer is registered under a name of its own, got {kind.name!r}: choose another")
    _added[kind.name] = kind
    return kind


def scorer_names() -> list[str]:
    """List the names that ``scorer_of`` takes."""
    return sorted([*_OURS, *_added])


def scorer_kind(name: object) -> type[Scorer]:
    """Find a scorer's class.

    Raises:
        ValueError: The name is not known.
    """
    if isinstance(name, str) and name in _added:
        return _added[name]
    if not isinstance(name, str) or name not in _OURS:
        raise ValueError(
            f"scorer must be one of {', '.join(map(repr, scorer_names()))}, got {name!r}: "
            "h2o_core.scorer.register makes another known"
        )
    kind: type[Scorer] = getattr(import_module(f"h2o_core.scorers.{name}"), _OURS[name])
    return kind


def scorer_of(value: object) -> Scorer:
    """Make a scorer from its name, from its fields with the name among them, or from itself.

    Raises:
        TypeError: It is none of them, or a parameter is of the wrong kind.
        ValueError: The name or a parameter is not known, or a value is outside its range.
    """
    if isinstance(value, Scorer):
        return value
    if isinstance(value, str):
        return scorer_kind(value)()
    if not isinstance(value, Mapping):
        raise TypeError(f"scorer must be a name, a Scorer, or a Scorer's fields, got {value!r}")
    parameters: dict[str, Any] = dict(value)
    kind = scorer_kind(parameters.pop("name", None))
    known = [known.name for known in fields(kind) if known.init]
    for name in parameters:
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "it has none"
            raise ValueError(f"scorer {kind.name!r} has no parameter {name!r}: {there}")
    return kind(**parameters)


def scorer_from(text: str) -> Scorer:
    """Read a scorer from a text such as ``"snapkv window=16"``.

    Raises:
        TypeError: A parameter is of the wrong kind.
        ValueError: The name or a parameter is not known, or a value does not fit.
    """
    name, *words = text.split() or [""]
    known = scorer_kind(name).__dataclass_fields__
    return scorer_of({"name": name} | dict(field_from(word, known, f"parameter of scorer {name!r}") for word in words))


def field_from(word: str, known: Mapping[str, Any], what: str) -> tuple[str, Any]:
    """Read ``NAME=VALUE``, the value as what it looks like.

    Args:
        word: The text.
        known: Fields of a dataclass by name.
        what: What they are, for the message.

    Raises:
        ValueError: The name is not among them.
    """
    name, _, text = word.partition("=")
    if name not in known:
        raise ValueError(f"{name!r} is no {what}: there are {', '.join(known)}")
    if text in ("True", "true", "False", "false") and isinstance(known[name].default, bool):
        return name, text in ("True", "true")
    for kind in (int, float):
        try:
            return name, kind(text)
        except ValueError:
            continue
    return name, text
