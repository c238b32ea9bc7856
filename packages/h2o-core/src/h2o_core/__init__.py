"""Score and evict: the pure state logic of a heavy-hitter KV cache.

The state is immutable and every step is a function of it, so that a researcher can replay attention
without a model and an adapter can put the steps where its framework has them.
"""

from h2o_core.attention import attend
from h2o_core.config import H2OConfig
from h2o_core.eviction import decode_step, evict, protected, release, survivors, victims
from h2o_core.scoring import observe
from h2o_core.simulate import Trace, simulate
from h2o_core.state import H2OState, admit, grow, init, occupied, pack, take, visible

__all__ = [
    "H2OConfig",
    "H2OState",
    "Trace",
    "admit",
    "attend",
    "decode_step",
    "evict",
    "grow",
    "init",
    "observe",
    "occupied",
    "pack",
    "protected",
    "release",
    "simulate",
    "survivors",
    "take",
    "victims",
    "visible",
]
