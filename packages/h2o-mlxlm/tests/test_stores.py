"""Rows in slots against a Python list of rows, each of which is stored by itself."""

import copy

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_mlxlm.forms import BITS, GROUP_SIZES, RowForm
from h2o_mlxlm.stores import Rows, no_rows

FORMS = [RowForm(), RowForm(8, 32), RowForm(4, 32), RowForm(4, 64)]
WIDTH = 64


def drawn(seed, batch, n, dtype=mx.float32, width=WIDTH):
    return (mx.random.normal((batch, 2, n, width), key=mx.random.key(seed)) * 3).astype(dtype)


def read_in_python(parts, form):
    """mlx's words, taken apart bit by bit: scale · q + bias, lowest bits first."""
    words, scales, biases = (x.astype(mx.float32).tolist() if i else x.tolist() for i, x in enumerate(parts))
    per_word, mask = 32 // form.bits, 2**form.bits - 1
    values = []
    for i in range(len(words) * per_word):
        q = (words[i // per_word] >> (form.bits * (i % per_word))) & mask
        group = i // form.group_size
        values.append(scales[group] * q + biases[group])
    return values, scales


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_what_is_stored_is_the_row_to_within_a_step(bits, group_size):
    form, rows = RowForm(bits, group_size), drawn(bits, 1, 1, width=128)[0, 0]
    parts, row = form.closed(rows), rows[0]
    values, scales = read_in_python([x[0] for x in parts], form)
    assert mx.allclose(form.opened(parts)[0], mx.array(values), atol=1e-5)
    assert sum(x.nbytes for x in parts) == 128 * bits // 8 + 128 // group_size * 2 * 4
    for g, scale in enumerate(scales):
        group = row[g * group_size : (g + 1) * group_size].tolist()
        # mlx moves the scale a little, so that zero or an end is met exactly.
        assert abs(scale) <= 1.2 * (max(group) - min(group)) / (2**bits - 1)
        stored = values[g * group_size : (g + 1) * group_size]
        assert all(abs(a - b) <= abs(scale) * 1.01 for a, b in zip(group, stored, strict=True))


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_rows_come_out_in_the_dtype_and_width_they_came_in(form, dtype):
    rows = no_rows(drawn(0, 3, 2, dtype), form)
    assert rows.kind == (2, WIDTH, dtype)
    rows = rows.appended(drawn(1, 3, 4, dtype))
    assert (rows.opened().dtype, rows.kind) == (dtype, (2, WIDTH, dtype))
    assert rows.opened(3).shape == (3, 2, 3, WIDTH)
    assert mx.array_equal(rows.opened(3), rows.opened()[:, :, :3])


@pytest.mark.parametrize("form", FORMS)
def test_overwriting_a_slot_leaves_the_bits_of_all_others(form):
    rows = no_rows(drawn(0, 2, 1), form).appended(drawn(1, 2, 9))
    for turn in range(40):
        # Loud rows, quiet ones, zeros: whatever would change a scale that slots share.
        new = drawn(turn, 2, 1) * (0, 1e-3, 1, 1e4)[turn % 4]
        where = mx.random.randint(0, 9, (2, 2, 1), key=mx.random.key(turn))
        before = [mx.array(x) for x in rows.arrays]
        rows = rows.put(where[..., None], new)
        others = (mx.arange(9) != where)[..., None]
        for x, old, stored in zip(rows.arrays, before, form.closed(new), strict=True):
            assert not mx.any((x != old) & others)
            assert mx.array_equal(mx.where(others, 0, x).sum(axis=2, keepdims=True).astype(x.dtype), stored)


# One step of a random life: what happens, and a number to draw rows, slots or sequences with.
STEPS = st.lists(st.tuples(st.sampled_from(["put", "append", "at", "widen", "of", "join"]), st.integers(0, 99)))


@settings(max_examples=40, deadline=None)
@given(steps=STEPS, form=st.sampled_from(FORMS))
def test_any_life_of_the_slots_is_that_of_a_list_of_rows(steps, form):
    def alone(x):
        return form.opened(form.closed(x))

    rows = no_rows(drawn(0, 2, 1), form).appended(drawn(0, 2, 3))
    naive = alone(drawn(0, 2, 3)).tolist()  # [B][H][C][D]
    for what, seed in steps:
        batch, width = len(naive), len(naive[0][0])
        key = mx.random.key(seed)
        if what == "put":
            where, new = mx.random.randint(0, width, (batch, 2, 1), key=key), drawn(seed, batch, 1)
            rows, stored = rows.put(where[..., None], new), alone(new).tolist()
            for b, h in ((b, h) for b in range(batch) for h in range(2)):
                naive[b][h][where[b, h, 0].item()] = stored[b][h][0]
        elif what == "append":
            new = drawn(seed, batch, 1 + seed % 4)
            rows, stored = rows.appended(new), alone(new).tolist()
            naive = [[naive[b][h] + stored[b][h] for h in range(2)] for b in range(batch)]
        elif what == "at":
            slots = mx.random.randint(0, width, (batch, 2, 1 + seed % width), key=key)
            rows, order = rows.at(slots), slots.tolist()
            naive = [[[naive[b][h][c] for c in order[b][h]] for h in range(2)] for b in range(batch)]
        elif what == "widen":
            rows = rows.widened(width + seed % 3)
            naive = [[head + [[0.0] * WIDTH] * (seed % 3) for head in heads] for heads in naive]
        elif what == "of":
            chosen = [(seed + i) % batch for i in range(1 + seed % 2)]
            rows, naive = rows.of(mx.array(chosen)), [copy.deepcopy(naive[b]) for b in chosen]
        else:
            rows = rows.joined([rows.none(1).widened(width)])
            naive = [*naive, [[[0.0] * WIDTH] * width for _ in range(2)]]
    assert rows.opened().tolist() == naive


def test_rows_of_some_sequences_can_be_stored_anew():
    rows, other = Rows(RowForm(8, 32).closed(drawn(0, 3, 4)), RowForm(8, 32)), drawn(1, 3, 4)
    mixed = rows.replaced(other, [False, True, False]).opened()
    assert mx.array_equal(mixed[0], rows.opened()[0])
    assert mx.array_equal(mixed[1], rows.replaced(other, [True] * 3).opened()[1])
    assert mx.allclose(mixed[1], other[1], atol=0.1)


@pytest.mark.parametrize(
    ("width", "size", "message"),
    [
        (96, 64, "keys have a head size of 96, which groups of kv_group_size=64 don't divide: use 32$"),
        (192, 128, "use 32 or 64$"),
        (80, 32, "leave kv_bits out with this model"),
    ],
)
def test_groups_that_do_not_divide_a_row_are_refused(width, size, message):
    with pytest.raises(ValueError, match=message):
        RowForm(4, size).check_width("keys", width)
    RowForm(None, size).check_width("keys", width)
    RowForm(4, 32).check_width("keys", 64)
