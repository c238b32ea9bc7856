"""How the emulator runs: what Metal leaves open (order of threads, order of sums) and what is checked."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

Schedule = Literal["forward", "reverse", "shuffled"]
SimdOrder = Literal["tree", "ascending", "descending"]
SCHEDULES: tuple[str, ...] = get_args(Schedule)
SIMD_ORDERS: tuple[str, ...] = get_args(SimdOrder)


@dataclass(frozen=True)
class Settings:
    """See `options`."""

    schedule: Schedule = "forward"
    simd_order: SimdOrder = "tree"
    seed: int = 0
    check: bool = True
    strict: bool = True
    compiler: str | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("schedule", self.schedule, SCHEDULES),
            ("simd_order", self.simd_order, SIMD_ORDERS),
        ):
            if value not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {value!r}")


_DEFAULT = Settings()
_settings: ContextVar[Settings] = ContextVar("mslemu_settings", default=_DEFAULT)


def current() -> Settings:
    """Return the settings in force."""
    return _settings.get()


@contextlib.contextmanager
def options(**changes: Any) -> Iterator[Settings]:
    """Change how kernels run inside a ``with`` block.

    Args:
        schedule: the order in which threads and threadgroups run: "forward", "reverse" or "shuffled".
        simd_order: the order in which simd_sum and its kin reduce: "tree", "ascending" or "descending".
        seed: of the shuffled schedule.
        check: watch memory (races, bounds, uninitialised reads); without it a kernel runs several times faster.
        strict: type-check with real address spaces before the first run.
        compiler: a C++ compiler's command, instead of the first of g++ and clang++ that is there.

    Raises:
        ValueError: an unknown schedule or order.
    """
    token = _settings.set(replace(_settings.get(), **changes))
    try:
        yield _settings.get()
    finally:
        _settings.reset(token)
