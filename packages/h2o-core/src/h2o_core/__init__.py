"""Score and evict: the pure state logic of a heavy-hitter KV cache.

The state is immutable and every step is a function of it, so that a researcher can replay attention
without a model and an adapter can put the steps where its framework has them.

Names load when they are first used: a configuration needs no mlx, and a command line answers ``--help`` at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h2o_core.attention import Mass, attend
    from h2o_core.config import H2OConfig
    from h2o_core.eviction import decode_step, evict, protected, release, survivors, victims
    from h2o_core.evidence import Evidence, gather
    from h2o_core.rows import Recording, Rows
    from h2o_core.scoring import observe
    from h2o_core.simulation import Trace, simulate
    from h2o_core.state import H2OState, admit, grow, init, occupied, pack, take, visible
    from h2o_core.summaries import Summary, summarize
    from h2o_core.traces import read_trace, write_trace

_NAMES = {
    "attention": ("Mass", "attend"),
    "config": ("H2OConfig",),
    "eviction": ("decode_step", "evict", "protected", "release", "survivors", "victims"),
    "evidence": ("Evidence", "gather"),
    "rows": ("Recording", "Rows"),
    "scoring": ("observe",),
    "simulation": ("Trace", "simulate"),
    "state": ("H2OState", "admit", "grow", "init", "occupied", "pack", "take", "visible"),
    "summaries": ("Summary", "summarize"),
    "traces": ("read_trace", "write_trace"),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [
    "Evidence",
    "H2OConfig",
    "H2OState",
    "Mass",
    "Recording",
    "Rows",
    "Summary",
    "Trace",
    "admit",
    "attend",
    "decode_step",
    "evict",
    "gather",
    "grow",
    "init",
    "observe",
    "occupied",
    "pack",
    "protected",
    "read_trace",
    "release",
    "simulate",
    "summarize",
    "survivors",
    "take",
    "victims",
    "visible",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    return value
