"""Rows in blocks: written once, in groups along a channel, with holes that are counted."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from h2o_mlxlm.blocks import Blocks
from h2o_mlxlm.forms import OUTLIERS, RANK, BlockForm, RowForm, low_rank
from h2o_mlxlm.stores import no_rows, rows_of

WIDTH, HEADS, G = 32, 2, 32
FORMS = {
    "kivi keys": BlockForm(4, G, per_channel=True),
    "kivi values": BlockForm(4, G, per_channel=False),
    "gear keys": BlockForm(4, G, per_channel=True, corrected=True),
}


def drawn(seed, batch, n, dtype=mx.float32, width=WIDTH):
    """Rows of which a few channels are far from 0, as keys have them."""
    far = mx.where(mx.arange(width) % 8 == 3, 10.0, 0.0)
    return (mx.random.normal((batch, HEADS, n, width), key=mx.random.key(seed)) + far).astype(dtype)


def quantised_in_python(numbers, bits):
    """The numbers of one group to the nearest of 2^bits levels between the least and the largest, in float64."""
    low, high = min(numbers), max(numbers)
    step = (high - low) / (2**bits - 1)
    return [low + round((x - low) / step) * step if step else x for x in numbers], step


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("g", [32, 64, 128])
@pytest.mark.parametrize("per_channel", [True, False])
def test_a_blocks_groups_lie_along_its_channels_or_its_tokens(per_channel, g, bits):
    form, width = BlockForm(bits, g, per_channel), 128
    block = drawn(bits, 1, g, width=width)[:, :, None]
    parts = form.closed(block)
    opened, rows = form.opened(parts)[0, 0, 0].tolist(), block[0, 0, 0].tolist()
    vectors = list(zip(*rows, strict=True)) if per_channel else rows
    stored = list(zip(*opened, strict=True)) if per_channel else opened
    for numbers, got in zip(vectors, stored, strict=True):
        for start in range(0, len(numbers), g):
            naive, step = quantised_in_python(numbers[start : start + g], bits)
            # mlx moves a group's levels by less than a step, so that 0 or an end is met exactly.
            assert all(abs(a - b) <= 1.01 * step for a, b in zip(naive, got[start : start + g], strict=True))
    assert sum(x.nbytes for x in parts) == HEADS * (g * width * bits // 8 + g * width // g * 2 * 4)


def test_channels_far_from_zero_cost_less_along_channels():
    """What KIVI is for: a token's group takes its step from them."""
    block, off = drawn(3, 4, G)[:, :, None], {}
    for per_channel in (True, False):
        form = BlockForm(4, G, per_channel)
        off[per_channel] = mx.square(form.opened(form.closed(block)) - block).mean().item()
    assert off[True] < off[False] / 4


@pytest.mark.parametrize("per_channel", [True, False])
def test_a_correction_brings_a_block_closer(per_channel):
    """GEAR: outliers come out exactly, and the rest as the best low rank of the error says, worked out in float64."""
    block = drawn(5, 1, G, width=64)[:, :, None]
    loud = mx.random.uniform(shape=block.shape, key=mx.random.key(0)) < 0.01
    block = mx.where(loud, block * 30, block)
    plain, gear = (BlockForm(4, G, per_channel, corrected) for corrected in (False, True))
    parts = gear.closed(block)
    opened = gear.opened(parts)
    before = mx.abs(plain.opened(plain.closed(block)) - block)
    assert mx.square(opened - block).mean() < mx.square(before).mean() / 4
    # Share of numbers that are exact: at least the outliers.
    assert (opened == block).mean().item() >= OUTLIERS * 0.98
    left, right, numbers, places = parts[3:]
    assert (left.shape[-1], right.shape[-2], numbers.shape[-2]) == (RANK, RANK, round(OUTLIERS * G * 64))
    assert (places.dtype, numbers.dtype) == (mx.uint16, mx.float32)


def test_low_rank_is_the_best_in_squares():
    x = mx.random.normal((3, 12, 20), key=mx.random.key(2))
    left, right = low_rank(x, 2)
    rest = mx.square(x - left @ right).sum(axis=(1, 2))
    s = mx.linalg.svd(x, stream=mx.cpu)[1]
    assert mx.allclose(rest, mx.square(s[:, 2:]).sum(axis=-1), rtol=1e-4)


# One step of a random life, and a number to draw rows and slots with.
STEPS = st.lists(
    st.tuples(st.sampled_from(["put"] * 8 + ["append", "at"]), st.integers(0, 99)), min_size=20, max_size=60
)


@settings(max_examples=25, deadline=None)
@given(steps=STEPS, name=st.sampled_from(list(FORMS)), start=st.integers(1, 150))
def test_any_life_keeps_each_row_and_changes_it_once(steps, name, start):
    """A row is exact while it is recent, then within a step of its group, and the same from then on."""
    form, batch = FORMS[name], 2
    store = no_rows(drawn(0, batch, 1), form).appended(drawn(start, batch, start))
    given, seen = drawn(start, batch, start), None  # the rows as they came, slot by slot; what came out last
    for what, seed in steps:
        width, key = given.shape[2], mx.random.key(seed)
        if what == "put":
            where, new = mx.random.randint(0, width, (batch, HEADS, 1), key=key), drawn(seed, batch, 1)
            store = store.put(where[..., None], new)
            hit = (mx.arange(width) == where)[..., None]
            given, seen = mx.where(hit, new, given), None if seen is None else mx.where(hit, new, seen)
        elif what == "append":
            new = drawn(seed, batch, 1 + seed % 40)
            store, given = store.appended(new), mx.concatenate([given, new], axis=2)
            seen = None if seen is None else mx.concatenate([seen, new], axis=2)
        else:
            order = mx.argsort(mx.random.uniform(shape=(batch, HEADS, width), key=key), axis=-1)
            order = order[..., : max(1, width - seed % 50)]
            store = store.at(order)
            given = mx.take_along_axis(given, order[..., None], axis=2)
            seen = None if seen is None else mx.take_along_axis(seen, order[..., None], axis=2)
            assert store.recent.shape[2] < 2 * G
        opened = store.opened()
        assert opened.shape == given.shape
        in_block = (store.places < store.n_blocks * G)[..., None]
        assert mx.all((opened == given) | in_block)
        assert mx.abs(opened - given).max() <= 1.1 * mx.abs(given).max() * 2 / 15
        if seen is not None:
            changed = mx.any(opened != seen, axis=-1)
            assert not mx.any(changed & ~in_block[..., 0])
            # What came out other than it went in has been in a block, and stays.
            was = mx.any(seen != given, axis=-1)
            assert not mx.any(changed & was)
        seen = opened
        for b, h in ((b, h) for b in range(batch) for h in range(HEADS)):
            places = store.places[b, h].tolist()
            assert len({p // G for p in places if p < store.n_blocks * G}) <= store.n_blocks


def test_blocks_are_cut_when_rows_are_old_and_freed_when_they_are_empty():
    form = FORMS["kivi keys"]
    store = no_rows(drawn(0, 1, 1), form).appended(drawn(1, 1, 70))
    assert (store.n_blocks, store.recent.shape[2]) == (0, 70)
    store = store.at(mx.broadcast_to(mx.arange(70), (1, HEADS, 70)))
    assert (store.n_blocks, store.recent.shape[2]) == (1, 38)
    counts = []
    # Slots 0 to 69 are overwritten one after the other, so that blocks empty in the order they were made.
    for i in range(140):
        store = store.put(mx.full((1, HEADS, 1, 1), i % 70), drawn(i, 1, 1))
        counts.append((store.n_blocks, store.recent.shape[2]))
    assert {recent for _, recent in counts} == set(range(G, 2 * G))
    # 70 rows, of which 32 to 63 are recent.
    assert max(blocks for blocks, _ in counts) == 2
    held = sum(x.nbytes for x in store.arrays)
    blocks, recent = counts[-1]
    block = HEADS * (G * WIDTH // 2 + WIDTH * 2 * 4)
    assert held == blocks * block + HEADS * (recent * WIDTH * 4 + 70 * 4)


def test_a_hole_stretches_no_scale():
    """A row that is gone when its block is cut leaves the others as if it had never been loud."""
    form, rows = FORMS["kivi keys"], drawn(1, 1, 2 * G - 1)
    loud = mx.where((mx.arange(2 * G - 1) == 5)[:, None], rows * 1e4, rows)
    store = no_rows(rows, form).appended(loud).put(mx.full((1, HEADS, 1, 1), 5), drawn(2, 1, 1))
    assert (store.n_blocks, store.recent.shape[2]) == (1, G)
    old = [i for i in range(G) if i != 5]
    off = mx.abs(store.opened()[:, :, old] - rows[:, :, old]).max(axis=2)
    assert mx.all(off <= (rows.max(axis=2) - rows.min(axis=2)) / 15)
    # The hole is in the block still, and counted.
    assert sum(x.nbytes for x in store.arrays[2:]) == HEADS * (G * WIDTH // 2 + WIDTH * 2 * 4)


@pytest.mark.parametrize("name", FORMS)
def test_batches_join_and_part_without_a_change_to_any_row(name):
    form, batches = FORMS[name], []
    for i, (batch, n) in enumerate([(1, 150), (2, 20), (1, 70)]):
        store = no_rows(drawn(0, batch, 1), form).appended(drawn(i, batch, n))
        store = store.at(mx.broadcast_to(mx.arange(n)[::-1], (batch, HEADS, n)))
        batches.append(store)
    wide = [x.widened(150) for x in batches]
    joined = wide[0].joined([*wide[1:], wide[0].none(1).widened(150)])
    opened, at = joined.opened(), 0
    assert opened.shape == (5, HEADS, 150, WIDTH)
    assert mx.isfinite(opened).all()
    for store in batches:
        batch, _, n = store.places.shape
        assert mx.array_equal(opened[at : at + batch, :, :n], store.opened())
        part = joined.of(mx.arange(at, at + batch)).at(mx.broadcast_to(mx.arange(n), (batch, HEADS, n)))
        assert mx.array_equal(part.opened(), store.opened())
        assert [x.shape for x in part.arrays] == [x.shape for x in store.arrays]
        at += batch


@pytest.mark.parametrize("name", FORMS)
def test_what_is_stored_can_be_taken_up_again(name):
    store = no_rows(drawn(0, 2, 1), FORMS[name]).appended(drawn(1, 2, 100))
    store = store.at(mx.broadcast_to(mx.arange(100), (2, HEADS, 100)))
    again = rows_of(store.stored, FORMS[name])
    assert isinstance(again, Blocks)
    assert mx.array_equal(again.opened(), store.opened())
    assert (again.kind, again.n_blocks) == ((HEADS, WIDTH, mx.float32), 2)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_rows_come_out_in_the_dtype_they_came_in(name, dtype):
    store = no_rows(drawn(0, 1, 1, dtype), FORMS[name]).appended(drawn(1, 1, 70, dtype))
    store = store.at(mx.broadcast_to(mx.arange(70), (1, HEADS, 70)))
    assert (store.opened().dtype, store.kind[2], store.n_blocks) == (dtype, dtype, 1)
    assert all(x.dtype in (dtype, mx.uint32, mx.uint16, mx.int32) for x in store.arrays)


def test_groups_along_a_width_must_divide_it():
    FORMS["kivi keys"].check_width("keys", 80)
    with pytest.raises(ValueError, match=r"values have a head size of 80, which groups of kv_group_size=32 don't"):
        FORMS["kivi values"].check_width("values", 80)
    with pytest.raises(ValueError, match="stored once"):
        no_rows(drawn(0, 1, 1), FORMS["kivi keys"]).replaced(drawn(0, 1, 1), [True])
    assert RowForm() != FORMS["kivi keys"]
