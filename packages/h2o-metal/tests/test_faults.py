"""Each barrier is needed, and each rule is tested: a kernel without it, or with another, is found out."""

import re

import mlx.core as mx
import mlx.nn as nn
import pytest

import h2o_core
import h2o_rope
import mslemu
from h2o_core import H2OConfig
from h2o_metal import attention, eviction, kernel, rotation


def decode(helpers, n_slots=300, head=(2, 128, 128), **changes):
    """A step and the reference's, where what decides are ties, places for totals, and the bounds of protection."""
    group, width, value_width = head
    settings = {"budget": n_slots - 1, "n_sink": 2, "grace": 5, "decay": 0.9, "long_share": 0.4}
    config = H2OConfig(**{**settings, **changes})
    for seed in range(4):
        state = helpers.random_state(seed, 1, 2, n_slots, distinct=2, strange=0.02 * (seed == 3))
        q, k, v = (
            helpers.normal(seed + i, 1, h, n, w)
            for i, (h, n, w) in enumerate([(2 * group, 1, width), (2, n_slots, width), (2, n_slots, value_width)])
        )
        k = k if seed % 2 else mx.zeros_like(k)
        sinks = helpers.normal(seed, 2 * group)
        helpers.assert_same_step(
            *(step(config, state, q, k, v, 0.1, sinks) for step in (eviction.decode_step, h2o_core.decode_step))
        )


def split_decode(helpers):
    decode(helpers)


def below_budget(helpers):
    decode(helpers, n_slots=40, head=(2, 64, 64), budget=40)


def with_holes(helpers):
    config = H2OConfig(budget=50, n_sink=2, grace=5, long_share=0.4)
    state = helpers.random_state(1, 1, 2, 40, empty=0.3)
    q, k, v = (helpers.normal(i, 1, h, n, 64) for i, (h, n) in enumerate([(4, 1), (2, 40), (2, 40)]))
    both = [step(config, state, q, k, v, 0.1) for step in (eviction.decode_step, h2o_core.decode_step)]
    helpers.assert_same_step(*both)


def at_the_bounds(helpers):
    """The lowest score is now a sink's, now that of the last row that may go, now of one with just a place or none."""
    config = H2OConfig(budget=39, n_sink=2, grace=5, long_share=0.25)  # 8 places; 16 totals tie for them
    for lowest in (1, 2, 3, 33, 34, 35, 19, 20, 21):
        state = helpers.random_state(lowest, 1, 1, 40)
        row = state.positions
        totals = mx.where((row >= 12) & (row < 28), 9.0, 1.0)
        state = state._replace(scores=mx.where(row == lowest, 0.0, 1.0), totals=totals)
        q, k, v = (helpers.normal(i, 1, 1, n, 64) for i, n in enumerate((1, 40, 40)))
        both = [step(config, state, q, 0 * k, v, 0.1) for step in (eviction.decode_step, h2o_core.decode_step)]
        helpers.assert_same_step(*both)


def attend_one(helpers):
    q, k, v = (helpers.normal(i, 1, h, n, 128) for i, (h, n) in enumerate([(4, 1), (2, 300), (2, 300)]))
    (out, mass), (expected, wanted) = (f(q, k, v, 0.1) for f in (attention.attend, h2o_core.attend))
    assert helpers.largest_difference(out, expected) < 1e-5
    assert helpers.largest_difference(mass.total, wanted.total) < 1e-5


def chunk(helpers):
    q, k, v = (helpers.normal(i, 1, h, n, 40) for i, (h, n) in enumerate([(4, 100), (2, 170), (2, 170)]))
    lengths, sinks = mx.array([90], mx.int32), helpers.normal(5, 4)
    args = (q, k, v, 0.1, 0.9, "causal", lengths, sinks)
    (_, mass), (_, wanted) = attention.attend(*args), h2o_core.attend(*args)
    assert helpers.largest_difference(mass.total, wanted.total) < 1e-5
    assert helpers.largest_difference(mass.decayed, wanted.decayed) < 1e-5


def select(helpers):
    for seed, (n_slots, budget) in enumerate([(700, 300), (40, 39), (40, 30), (600, 550)]):
        config = H2OConfig(budget=budget, n_sink=2, grace=5, long_share=0.4)
        state = helpers.random_state(seed, 1, 2, n_slots, distinct=2, empty=0.05, strange=0.02)
        assert mx.array_equal(eviction.victims(config, state), h2o_core.victims(config, state))
        ours, theirs = eviction.evict(config, state), h2o_core.evict(config, state)
        assert mx.array_equal(ours[1], theirs[1])
        assert all(mx.array_equal(x, y, equal_nan=True) for x, y in zip(ours[0][:4], theirs[0][:4], strict=True))


def rotate(helpers):
    x, at = helpers.normal(0, 1, 2, 9, 24), 7 * mx.arange(9)
    for rope in (nn.RoPE(16), nn.RoPE(16, traditional=True), h2o_rope.Rotation(mx.array([1.0, 0.1]), False, 1.3, 0.5)):
        for name, args in (("rotate", (at,)), ("derotate", (at,)), ("rerotate", (at, at[::-1]))):
            ours, theirs = (getattr(module, name)(x, *args, rope) for module in (rotation, h2o_rope))
            assert helpers.largest_difference(ours, theirs) < 1e-5


RUNS = {
    "h2o_decode": decode,
    "h2o_decode_merge": split_decode,
    "h2o_attend_part": split_decode,
    "h2o_attend_one": attend_one,
    "h2o_attend_merge": attend_one,
    "h2o_softmax_rows": chunk,
    "h2o_column_mass": chunk,
    "h2o_victims": select,
    "h2o_evict": select,
    "h2o_rotate": rotate,
}
SHARED = ("h2o_decode_merge", "h2o_attend_part", "h2o_attend_merge")
BARRIERS = [
    (name, part, i)
    for name in RUNS
    for part, text in zip(("header", "source"), kernel.text(name), strict=True)
    for i in range(len(mslemu.barriers(text)))
]


def test_no_kernel_and_no_barrier_is_left_out():
    assert set(RUNS) == set(kernel.TEXTS)
    words = re.compile(r"^(?!\s*//).*_barrier\(", re.MULTILINE)
    assert len(BARRIERS) == sum(len(words.findall(part)) for name in RUNS for part in kernel.text(name))


def run(helpers, monkeypatch, name):
    """Everything that could show a fault of a kernel."""
    if name in SHARED:
        monkeypatch.setattr(attention, "WHOLE", 64)
        monkeypatch.setattr(attention, "PART", 100)
    RUNS[name](helpers)
    if name == "h2o_decode":
        below_budget(helpers)
        with_holes(helpers)
        at_the_bounds(helpers)


def changed(name, part, change):
    def apply(definition):
        if definition["name"] == name:
            definition[part] = change(definition[part])
        return definition

    return apply


@pytest.mark.parametrize("name", RUNS)
def test_the_runs_pass_and_launch_the_kernel(emulator, helpers, monkeypatch, name):
    with kernel.launches() as ran:
        run(helpers, monkeypatch, name)
    assert name in ran


@pytest.mark.parametrize(("name", "part", "i"), BARRIERS)
def test_each_barrier_is_needed(emulator, helpers, monkeypatch, name, part, i):
    emulator(changed(name, part, lambda text: mslemu.without_barrier(text, i)))
    with pytest.raises(mslemu.MslError, match=r"race|uninitialised"):
        run(helpers, monkeypatch, name)


# name, part, what stands there, what stands there instead: the rules a mistake would break
MISTAKES = {
    "of a tie the newest goes": ("h2o_decode", "header", "ulong(uint(position))", "ulong(~uint(position))"),
    "a tie goes by slot": ("h2o_decode", "header", "| ulong(uint(position))", "| ulong(uint(position) * 0u + 1u)"),
    "one sink too few": ("h2o_decode", "header", "positions[c] >= n_sink", "positions[c] >= n_sink - 1"),
    "one sink too many": ("h2o_decode", "header", "positions[c] >= n_sink", "positions[c] > n_sink"),
    "one of grace too few": ("h2o_decode", "header", "positions[c] <= last", "positions[c] <= last + 1"),
    "one of grace too many": ("h2o_decode", "header", "positions[c] <= last", "positions[c] < last"),
    "no decay": ("h2o_decode", "source", "score * numbers[1] + mass", "score + mass"),
    "totals decay": ("h2o_decode", "source", "total + mass", "total * numbers[1] + mass"),
    "a group's sum, not its mean": ("h2o_decode", "header", "sum / float(G)", "sum"),
    "no places for totals": ("h2o_decode", "source", "uint(limits[3])", "0u"),
    "one place too many": ("h2o_decode", "source", "uint(limits[3])", "uint(limits[3]) + 1u"),
    "one place too few": ("h2o_decode", "header", "total >= long_term", "total > long_term"),
    "places by score": ("h2o_decode", "header", "key(totals[c], positions[c])", "key(scores[c], positions[c])"),
    "totals need not be finite": ("h2o_evict", "header", "finite(scores[c]) && finite(totals[c])", "finite(scores[c])"),
    "what is not finite stays": ("h2o_evict", "header", "scores[c] : -INFINITY", "scores[c] : INFINITY"),
    "negative numbers backwards": ("h2o_evict", "header", "bits >> 31 ? ~bits", "bits >> 31 ? bits"),
    "one kept too few": ("h2o_evict", "source", "rank >= least", "rank > least"),
    "empty slots first": (
        "h2o_evict",
        "source",
        "empty ? rank == 0ul : rank >= least",
        "empty ? rank >= least : rank == 0ul",
    ),
    "no empty slot behind": ("h2o_evict", "source", "new_positions[into + c] = -1", "new_positions[into + c] = 0"),
    "a head at its budget loses one": ("h2o_decode", "source", "> uint(limits[0])", ">= uint(limits[0])"),
    "an empty slot is attended to": ("h2o_decode", "source", "shown = place >= 0", "shown = place >= -1"),
    "sinks left out": ("h2o_decode", "source", "if (SINKS) sum +=", "if (!SINKS) sum +="),
    "sinks of another head": ("h2o_decode", "source", "sinks[long(h * G + t.index)", "sinks[long(t.index)"),
    "a part's sums unscaled": ("h2o_decode_merge", "source", "* h2o::share(stats[(i * G + g) * 2], top[g])", ""),
    "the diagonal left out": ("h2o_column_mass", "source", "c > C - N + i", "c >= C - N + i"),
    "one beyond the diagonal": ("h2o_column_mass", "source", "c > C - N + i", "c > C - N + i + 1"),
    "weights of the diagonal left out": ("h2o_softmax_rows", "source", "c > C - N + i", "c >= C - N + i"),
    "decay one step off": ("h2o_column_mass", "source", "n_real - 1 - i", "n_real - i"),
    "padding counts": ("h2o_column_mass", "source", "lengths[long(b) * lengths_strides[0]]", "N"),
    "blocks of queries left out": ("h2o_column_mass", "source", "? max(0, c0 - (C - N))", "? max(0, c0)"),
    "turned the other way": ("h2o_rotate", "source", "forth ? metal::precise::sin", "!forth ? metal::precise::sin"),
    "a factor twice": ("h2o_rotate", "source", "T(a / after)", "T(a * after)"),
    "pairs of the other layout": ("h2o_rotate", "source", "TRADITIONAL ? 2 * i : i", "!TRADITIONAL ? 2 * i : i"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(emulator, helpers, monkeypatch, mistake):
    name, part, right, wrong = MISTAKES[mistake]

    def change(text):
        assert text.count(right) >= 1
        return text.replace(right, wrong)

    emulator(changed(name, part, change))
    with pytest.raises((AssertionError, mslemu.MslError)) as found:
        run(helpers, monkeypatch, name)
    assert "text.count" not in str(found.value)
