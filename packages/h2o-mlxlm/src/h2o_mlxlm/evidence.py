"""What a call showed, into scores, for scorers that look at more than the mass."""

import mlx.core as mx

from h2o_core import Evidence, H2OConfig, observe
from h2o_core.eviction import merged
from h2o_mlxlm.backend import Backend
from h2o_mlxlm.counts import Call
from h2o_mlxlm.ragged import lengths_of
from h2o_mlxlm.slots import Slots, bounded


def observed(config: H2OConfig, backend: Backend, slots: Slots, evidence: Evidence, call: Call, over: bool) -> Slots:
    """End a call as ``scored`` does, for any scorer; where it merges, a single row that goes leaves its value behind.

    Args:
        config: Scorer, budget.
        backend: Who finds the lowest.
        slots: The slots that the call attended to, nothing gone yet.
        evidence: Of the first M slots, as they were attended to.
        call: The call that is over.
        over: All heads are over the budget, and their lowest are to go.
    """
    slots = slots._replace(state=observe(config, slots.state, evidence, call.n_tokens, lengths_of(call.lengths)))
    if config.scorer.merges and any(losing := call.losing_one):
        # Heads of the other sequences may hold more than the budget too, while their prompts are held.
        values: mx.array = merged(config, slots.state, slots.values.opened(), backend.victims(config, slots.state))
        slots = slots._replace(values=slots.values.replaced(values, losing))
    return bounded(config, backend, slots) if over else slots
