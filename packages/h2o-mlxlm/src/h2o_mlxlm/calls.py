"""A call of the model to one cache: from its new keys and values to who goes.

No arithmetic of its own: who stays is core's to say, rotation is rope's, and both come from the back end.
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Literal

import mlx.core as mx

from h2o_core import Evidence, Mass, gather
from h2o_mlxlm.backend import Backend
from h2o_mlxlm.batch import Batch
from h2o_mlxlm.checks import check_call, raise_ended, raise_unreported
from h2o_mlxlm.counts import Call, Counts, Part, called
from h2o_mlxlm.evidence import observed
from h2o_mlxlm.forms import RowForm
from h2o_mlxlm.ledger import Ledger, Step
from h2o_mlxlm.passes import Passes
from h2o_mlxlm.ragged import lengths_of, per_sequence, settled, visibility
from h2o_mlxlm.slots import Slots, appended, arrays_of, capacity, none_yet, packed, ranks, replaced, scored, written
from h2o_mlxlm.stores import only, rows_at
from h2o_rope import Rotation


class Calls(Batch):
    """Cache calls, one after the other.

    A call is open from ``_take_in`` until something asks for its outcome: the next call, ``state``,
    ``nbytes``, ``kept_positions`` or ``scores``. Then the mass that the call's attention reported goes into
    the scores, and the lowest rows go. So a layer that attends twice to one cache (shared KV layers) counts
    in full, and nothing goes before it has been attended to. Only ``step`` ends a call by itself, and evidence
    that is more than a mass: it holds keys and values, which must be free before the next row is written.
    """

    scale: float | None
    rotation: Rotation | None
    backend: Backend
    ledger: Ledger
    layer: int
    inputs: Mapping[str, mx.array]  # the caller's, for the scorer
    plain: bool  # the scorer is H2O as it is by default: a mass is all it needs, and its step can be fused
    attended: bool  # the scorer looks at the model's attention, which is to be reported

    def _begin(self, counts: Counts) -> None:
        """Have seen nothing yet."""
        self.offset = 0
        self._slots = None
        self._counts = counts
        self._batched = False  # there is a count for each sequence
        self._to_come = None  # real tokens of a padded prompt
        self._ranks = None  # of the rows shown last, if they filled all slots
        self._call = None  # the last one
        self._open = 0  # tokens of the open call, padding included
        self._whole = False  # the open call is shown every slot, for ``step``
        self._free = None  # an empty slot of each head, if ``step`` has left one
        self._mass: Mass | None = None
        self._evidence: Evidence | None = None
        self.passes, self._pass = Passes(), 0  # until caches of one model come to share them

    def _entered(self, call: Call) -> int:
        return self.passes.enter(self._pass, call.before[0].seen, call.after[0].seen)

    @abstractmethod
    def _remember(self, before: Slots, slot: mx.array, counts: Counts) -> None:
        """Remember a token whose rows went to ``slot``, and what was before it: it may be taken back."""

    def _take_in(self, keys: mx.array, values: mx.array, part: Part | None = None) -> tuple[mx.array, mx.array]:
        """Give the rows of a call, or of a part of one, slots and return what it attends to.

        Args:
            keys: New keys [B, H, N, D], rotated at ``offset``.
            values: New values [B, H, N, Dv].
            part: What they are a part of; None if they are the whole call.

        Returns:
            Keys and values [B, H, M, D], [B, H, M, Dv]; the N new rows are the last if N > 1.

        Raises:
            ValueError: Batch, heads, width or dtype differ from the calls before, or groups don't divide a row.
            RuntimeError: The call before this one was never reported to ``observe``, or never reached other layers.
        """
        n = keys.shape[2]
        call, to_come = called(self.config, self._counts, n, self._to_come, part)
        mass = self._mass if n == 1 and call.lengths is None and self._in_steady_decode() else None
        if mass is None:
            self._end_call()
        check_call(self.config, call, self._slots, keys, values, self._batched)
        number = self._entered(call) if part is None else self._pass
        if self.rotation is not None and any(c.rolling for c in call.before):
            first = [c.place + ahead for c, ahead in zip(call.before, call.ahead, strict=True)]
            places = per_sequence(first) + mx.arange(n, dtype=mx.int32)
            keys = only([c.rolling for c in call.before], self.backend.derotate(keys, places, self.rotation), keys)
        slots = none_yet(keys, values, self.forms, self.config.scorer) if self._slots is None else self._slots
        before, where = slots, None
        if mass is not None:
            state, where = self.ledger.turn(self.layer, Step(self.config, slots.state, mass.total))
            slots = replaced(slots, state, where, keys, values)
        elif n == 1:
            lengths = lengths_of(call.lengths)
            slots, where = written(slots, keys, values, call.most, self.config.budget, lengths, self._free)
        else:
            slots = appended(slots, keys, values, call.most, lengths_of(call.lengths))
        # All at once: an interrupt comes before it, and nothing has changed, or after it, and the call is open.
        self._slots, self._mass, self._call, self._open, self._to_come, self._free = slots, None, call, n, to_come, None
        self._pass = number
        if where is not None:
            self._remember(before, where, call.before)
        self._whole = self._steps(call)
        self._count(call.after)
        shown = self.keys_and_values()
        if not self.attended:
            self.observe(self._own_evidence(keys, *shown))
            # No attention of ours need follow.
            keys, values = self.tied(*shown)
            return keys, values
        return shown

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return what the open call attends to, or without one what the next call will."""
        slots, call = self._live(), self._call if self._open else None
        shown = self.size() if call is None else call.most + call.n_tokens
        if call is None:
            slots = packed(slots, shown)
        opened = None if self._whole or shown == capacity(slots) else shown
        keys, values = slots.keys.opened(opened), slots.values.opened(opened)
        rolling = [] if self.rotation is None else [c.rolling for c in (self._counts if call is None else call.before)]
        if self.rotation is not None and any(rolling):
            places, ahead = self._places(slots, call, shown)[..., :opened], (0,) if call is None else call.ahead
            if any(ahead):
                # As far ahead as the queries are: distances are what counts.
                places = places + per_sequence(ahead)
            keys = only(rolling, self.backend.rotate(keys, places, self.rotation, below=shown + max(ahead)), keys)
        return keys, values

    def view(self) -> tuple[mx.array | Literal["causal"] | None, mx.array | None]:
        """Say what the last call's queries may attend to, as ``attend`` takes it: mask and lengths."""
        call = self._last_call()
        mask = visibility([c.kept for c in call.before], call.n_tokens)
        if mask is None:
            return "causal" if call.n_tokens > 1 else None, lengths_of(call.lengths)
        return mask, lengths_of(call.lengths)

    def step(
        self, queries: mx.array, keys: mx.array, values: mx.array, scale: float, sinks: mx.array | None
    ) -> mx.array | None:
        """Attend with the open call's one token and end the call, in one launch of the back end.

        Args:
            queries: [B, Hq, 1, D].
            keys: What ``update_and_fetch`` returned.
            values: Likewise.
            scale: Factor on the logits.
            sinks: Sink logits [Hq].

        Returns:
            The output [B, Hq, 1, Dv]; None if this call has to be attended to and observed in steps.
        """
        if not self._whole:
            return None
        slots, call = self._live(), self._last_call()
        out, state, victim = self.backend.decode_step(
            self.config, slots.state, queries, keys, values, scale, sinks=sinks
        )
        self._slots, self._open, self._whole = slots._replace(state=state), 0, False
        self._free = victim if all(call.over) else None
        return self.tied(out)[0]

    def tied(self, *outputs: mx.array) -> list[mx.array]:
        """Make the outputs of a call bring its scores with them.

        Decode evaluates logits alone: what is not tied to them piles up as a graph, or is left over for another thread,
        which can't evaluate it.
        """
        tied: list[mx.array] = mx.depends(list(outputs), self._due())
        return tied

    def _due(self) -> list[mx.array]:
        due = (*(self._mass or ()), *arrays_of(self._live().state), self._free)
        return [x for x in due if x is not None]

    def gathered(
        self,
        mass: Mass | None,
        queries: mx.array,
        keys: mx.array,
        values: mx.array,
        scale: float,
        sinks: mx.array | None = None,
    ) -> Mass | Evidence:
        """Gather what the scorer needs of the open call: the mass alone by default; see ``h2o_core.gather``."""
        if self.plain and mass is not None:
            return mass
        mask, lengths = self.view()
        state = self._live().state
        return gather(self.config, state, mass, queries, keys, values, scale, mask, lengths, sinks, self.inputs)

    def observe(self, mass: Mass | Evidence) -> None:
        """Take the mass that the open call's attention gave to each row it attended to, or more evidence.

        Args:
            mass: Two float32 [B, H, M], made with the configuration's decay; or what ``gathered`` returned.

        Raises:
            RuntimeError: No call is open.
        """
        if not self._open:
            raise_ended()
        if isinstance(mass, Evidence):
            self._evidence = mass
            self._close()
            return
        self._mass = mass if self._mass is None else Mass(*map(mx.add, self._mass, mass))
        if not self.config.rewind and self._in_steady_decode():
            self.ledger.leave(self.layer, Step(self.config, self._live().state, self._mass.total))

    def _end_call(self) -> None:
        self._close()

    def _close(self) -> None:
        """Score what the open call attended to and let the lowest go."""
        call, shown = self._call, self._evidence or self._mass
        if not self._open or call is None:
            return
        if shown is None:
            raise_unreported()
        slots, over = self._live(), call.over
        # Where sequences differ, a call may leave empty slots between the rows, or rows that stay beyond the budget.
        full = call.n_tokens == 1 and (capacity(slots) == self.config.budget + 1 or not any(over))
        even = full or call.is_even
        lengths = lengths_of(call.lengths)
        if isinstance(shown, Mass):
            slots = scored(self.config, self.backend, slots, shown, call.n_tokens, even and any(over), lengths)
        else:
            slots = observed(self.config, self.backend, slots, shown, call, even and any(over))
        if not even:
            slots = settled(self.config, self.backend, slots, over, self.size())
        if self.rotation is not None and any(call.turning):
            keys = self.backend.derotate(slots.keys.opened(), slots.state.positions, self.rotation)
            slots = slots._replace(keys=slots.keys.replaced(keys, call.turning))
        self._slots, self._open, self._mass, self._evidence = slots, 0, None, None
        self.ledger.forget(self.layer)

    def _last_call(self) -> Call:
        if self._call is None:
            raise_ended()
        return self._call

    def _steps(self, call: Call) -> bool:
        """Say whether the back end can take the call in one launch: at most one row of a head has to go."""
        if not self.backend.fused or call.n_tokens > 1 or call.lengths is not None or any(call.turning):
            return False
        if any(c.holding for c in call.after):
            return False
        return self.attended and self.plain and capacity(self._live()) <= self.config.budget + 1

    def _in_steady_decode(self) -> bool:
        """Say whether the open call has one token, fills every slot and will leave one empty, by the reference."""
        call, width = self._call, self.config.budget + 1
        if self.backend.name != "reference":
            return False
        if self._open != 1 or self._mass is None or call is None or call.most + 1 != width:
            return False
        turning = self.rotation is not None and any(call.turning)
        return all(call.over) and not turning and capacity(self._live()) == width

    def _count(self, counts: Counts) -> None:
        self._counts = counts
        self.offset = mx.array([c.place for c in counts], mx.int32) if self._batched else counts[0].place

    def _places(self, slots: Slots, call: Call | None, shown: int) -> mx.array:
        """The place of each row among its head's rows, where keys roll."""
        if call is None or not call.is_even:
            self._ranks = None
            open_rows = (0,) * len(self._counts) if call is None else call.real
            counts = self._counts if call is None else call.before
            return ranks(slots, per_sequence([c.kept + n for c, n in zip(counts, open_rows, strict=True)]))
        places = ranks(slots, shown, self._ranks if call.n_tokens == 1 else None)
        # Only ranks of full slots carry over: the next row must take the place of one that has a rank.
        self._ranks = places if shown == capacity(slots) else None
        return places

    def _own_evidence(self, keys: mx.array, shown: mx.array, values: mx.array) -> Mass | Evidence:
        """What the cache sees without the model's queries: its rows, and each incoming key in place of its query."""
        if self.config.queries == "true":
            return self.gathered(None, keys, shown, values, 1.0)
        n = keys.shape[2]
        if n > 1:
            keys = shown[:, :, -n:]
        elif self.rotation is not None or self.forms[0] != RowForm():
            keys = rows_at(shown, mx.argmax(self._live().state.positions, axis=-1, keepdims=True))
        scale = keys.shape[-1] ** -0.5 if self.scale is None else self.scale
        mass = self.backend.attend(keys, shown, shown[..., :0], scale, self.config.decay, *self.view())[1]
        return self.gathered(mass, keys, shown, values, scale)

    def _live(self) -> Slots:
        if self._slots is None:
            raise ValueError("this cache is empty: it has no rows before its first update_and_fetch")
        return self._slots
