"""What heads need: budgets by it against a naive search, files that anyone may have written, who a model is."""

import json
import math
from importlib import resources
from itertools import combinations

import mlx.core as mx
import mlx.nn as nn
import pytest
from hypothesis import given
from hypothesis import strategies as st

from h2o_mlxlm import Needs, load_needs, needs, save_needs
from h2o_mlxlm.identity import needs_identity

BUDGETS = (8, 16, 64, 128)
SOME = Needs("0123456789abcdef", (8, 32), (((0.5, 0.25), (0.0, 0)), ((2.0, 0.5),)))
loss = st.one_of(st.floats(0, 1), st.integers(0, 8).map(lambda n: n / 8))
layers = st.lists(st.lists(st.tuples(*[loss] * 4), min_size=1, max_size=3), min_size=1, max_size=4)


def of(losses):
    return Needs("a model", BUDGETS, tuple(tuple(map(tuple, layer)) for layer in losses))


def costs_of(losses):
    return [[math.exp(math.log(max(x, 1e-5))) for x in head] for layer in losses for head in layer]


def raises(costs, tokens, held, sizes):
    """All raises that save: how much a token, the head, to what."""
    for head, now in enumerate(held):
        for level, n in enumerate(tokens):
            saved = costs[head][tokens.index(now)] - costs[head][level]
            if n > now and saved > 0:
                yield saved / (sizes[head] * (n - now)), head, n


def searched(costs, tokens, budget, sizes):
    """The rule as it is told, everything looked at again for every raise; one may stand for several heads."""
    held = [tokens[0]] * len(costs)
    while True:
        room = budget * sum(sizes) - sum(n * size for n, size in zip(held, sizes, strict=True))
        all_raises = raises(costs, tokens, held, sizes)
        fitting = [r for r in all_raises if sizes[r[1]] * (r[2] - held[r[1]]) <= room]
        if not fitting:
            return held
        most = max(gain for gain, _, _ in fitting)
        _, head, n = min((r for r in fitting if r[0] == most), key=lambda r: r[1:])
        held[head] = n


@given(layers, st.sampled_from([(0.5, 1, 4, 8), (0.5, 8, 4), (1,), (0.5, 1)]))
def test_budgets_are_those_of_a_naive_search(losses, levels):
    """With budgets that were measured, so that the losses are known."""
    found = of(losses).budgets_for(16, levels, least=1)
    assert [len(layer) for layer in found] == [len(layer) for layer in losses]
    held, tokens = [n for layer in found for n in layer], sorted(int(16 * level) for level in levels)
    costs = [[cost[BUDGETS.index(n)] for n in tokens] for cost in costs_of(losses)]
    assert held == searched(costs, tokens, 16, [1] * len(held))
    room = 16 * len(held) - sum(held)
    assert room >= 0
    assert all(n - held[head] > room for _, head, n in raises(costs, tokens, held, [1] * len(held)))


@given(layers, st.sampled_from([(0.5, 1, 4, 8), (0.5, 8, 4)]))
def test_a_layer_with_one_budget_is_raised_as_one(losses, levels):
    found = of(losses).budgets_for(16, levels, least=1, groups=1)
    tokens = sorted(int(16 * level) for level in levels)
    each = [[[cost[BUDGETS.index(n)] for n in tokens] for cost in costs_of([layer])] for layer in losses]
    alone = searched([head for layer in each for head in layer], tokens, 16, [1] * sum(map(len, each)))
    expected = iter(alone)
    by_head = [[next(expected) for _ in layer] for layer in losses]
    if all(len(set(layer)) == 1 for layer in by_head):
        assert found == by_head
        return
    costs = [[sum(head[i] for head in layer) for i in range(len(tokens))] for layer in each]
    held = searched(costs, tokens, 16, [len(layer) for layer in losses])
    assert found == [[n] * len(layer) for n, layer in zip(held, losses, strict=True)]


@given(layers, st.integers(24, 3000), st.integers(1, 3))
def test_a_layer_has_no_more_budgets_than_groups(losses, budget, groups):
    found = of(losses).budgets_for(budget, groups=groups)
    assert all(len(set(layer)) <= groups for layer in found)
    assert [len(layer) for layer in found] == [len(layer) for layer in losses]
    assert sum(map(sum, found)) <= budget * sum(map(len, losses))
    free = of(losses).budgets_for(budget, groups=13)
    if all(len(set(layer)) <= groups for layer in free):
        assert found == free


def test_heads_whose_budgets_are_close_are_put_together():
    """By ratio: 8 and 16 are closer than 16 and 64."""
    much, some, little = (8.0, 4.0, 0.1, 0.01), (0.2, 0.01, 0.01, 0.01), (0.0,) * 4
    one = of([[much, little, some]])
    levels = (0.25, 0.5, 2)
    assert one.budgets_for(32, levels, least=1) == [[64, 8, 16]]
    assert one.budgets_for(32, levels, least=1, groups=2) == [[64, 16, 16]]
    assert one.budgets_for(32, levels, least=1, groups=1) == [[16, 16, 16]]


@pytest.mark.parametrize("groups", [0, 14, 2.0, True])
def test_groups_are_a_number_of_budgets(groups):
    with pytest.raises(ValueError, match="groups must be a whole number from 1 to 13, got"):
        SOME.budgets_for(16, groups=groups)


@given(layers)
def test_a_head_with_more_to_save_gets_no_less(losses):
    """More between any two levels: a head that loses much whatever its budget does not come first."""
    costs = costs_of(losses)
    held = [n for layer in of(losses).budgets_for(16, (0.5, 1, 4, 8), least=1) for n in layer]
    for a, b in combinations(range(len(costs)), 2):
        # The lower one has the lot where they are equal.
        if all(costs[a][i] - costs[a][j] >= costs[b][i] - costs[b][j] for i, j in combinations(range(4), 2)):
            assert held[a] >= held[b]


@given(layers, st.integers(4, 3000))
def test_the_total_is_that_of_equal_budgets_at_most(losses, budget):
    held = [n for layer in of(losses).budgets_for(budget) for n in layer]
    assert sum(held) <= budget * len(held)
    assert min(held) >= min(24, budget)


@given(st.floats(0.3, 2.5), st.integers(1, 5000))
def test_between_and_beyond_what_was_measured_loss_is_a_power_of_the_budget(slope, budget):
    losses = [0.5 * (n / 16) ** -slope for n in BUDGETS]
    expected = 0.5 * (budget / 16) ** -slope
    if all(x > 1e-5 for x in losses):
        assert math.isclose(needs._loss_at(BUDGETS, losses, budget), expected, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("losses", "budget", "expected"),
    [
        ((1.0, 0.5), 64, 0.5 * 0.25),
        ((1.0, 0.5), 4, 2.0),
        # No steeper and no flatter than the limits, beyond; as it is, between.
        ((1.0, 0.0), 32, 1e-5 * 2**-2.5),
        ((1.0, 0.0), 4, 2**2.5),
        ((0.5, 0.5), 64, 0.5 * 4**-0.3),
        ((0.2, 0.8), 4, 0.2 * 2**0.3),
        ((0.01, 0.0001), 11, 0.01 * (11 / 8) ** (math.log(0.01) / math.log(2))),
        ((0.2, 0.8), 12, 0.2 * 1.5**2),
        ((0.0, 0.0), 12, 1e-5),
    ],
)
def test_a_line_goes_on_as_steep_as_is_allowed(losses, budget, expected):
    assert math.isclose(needs._loss_at((8, 16), losses, budget), expected, rel_tol=1e-9)


def test_levels_are_rounded_down_to_whole_tokens():
    flat = of([[(0.9, 0.5, 0.1, 0.01)] * 3])
    assert flat.budgets_for(17, (0.5,), least=1) == [[8, 8, 8]]
    # 0.29 · 100 is 28.999999999999996 in binary.
    assert flat.budgets_for(100, (0.29,)) == [[29, 29, 29]]


@pytest.mark.parametrize(
    ("budget", "levels", "message"),
    [
        (16, (2, 4), r"lowest level must be 1 at most, for budgets to fit, got levels=\(2, 4\)"),
        (16, (), r"levels must be positive .* got \(\) with budget=16"),
        (16, (0, 1), "levels must be positive"),
        (16, (math.nan,), "levels must be positive"),
        (16, (1, math.inf), "levels must be positive"),
        (0, (1,), "budget must be a whole number from 1"),
        (16.0, (1,), "budget must be .* got 16.0"),
        (True, (1,), "budget must be"),
    ],
)
def test_budgets_that_can_not_be_are_refused(budget, levels, message):
    with pytest.raises(ValueError, match=message):
        SOME.budgets_for(budget, levels, least=1)


@pytest.mark.parametrize("least", [0, 2.0, True])
def test_the_least_is_a_number_of_tokens(least):
    with pytest.raises(ValueError, match="least must be a whole number of tokens from 1"):
        SOME.budgets_for(16, least=least)


def test_every_head_gets_the_least_if_the_mean_allows():
    assert SOME.budgets_for(16, (0.5, 1, 4, 8)) == [[16, 16], [16]]
    assert SOME.budgets_for(32, (0.5, 1, 2)) == [[32, 24], [32]]
    assert SOME.budgets_for(30, (0.25, 1)) == [[30, 24], [30]]


def test_a_file_brings_back_what_was_saved(tmp_path):
    path = tmp_path / "new" / "needs.json"
    save_needs(path, SOME, {"texts": {"prose": "of which sum"}, "date": "today"})
    assert load_needs(path) == SOME
    assert json.loads(path.read_text())["about"]["texts"] == {"prose": "of which sum"}
    assert [file.name for file in path.parent.iterdir()] == ["needs.json"]


GOOD = {"format": 1, "model": "a model", "budgets": [8, 32], "losses": [[[0.5, 0.25]], [[1, 0]]]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "its format is 2, and this version reads 1"),
        ({"model": 7}, "model must be an identity of up to 64 letters, got 7"),
        ({"model": ""}, "model must be"),
        ({"budgets": [8]}, r"budgets must be .* got \(8,\)"),
        ({"budgets": [32, 8]}, "budgets must be"),
        ({"budgets": [8, 8]}, "budgets must be"),
        ({"budgets": [0, 8]}, "budgets must be"),
        ({"budgets": [8, 32.0]}, "budgets must be"),
        ({"budgets": [True, 8]}, "budgets must be"),
        ({"budgets": 8}, "budgets must be"),
        ({"budgets": list(range(1, 66))}, "budgets must be"),
        ({"losses": []}, "losses must be a tuple of layers"),
        ({"losses": {"0": 1}}, "losses must be a tuple of layers"),
        ({"losses": [[[0.5, 0.25]], []]}, "losses must be a tuple of layers"),
        ({"losses": [[[0.5, 0.25]], [[1.0]]]}, r"of 2 numbers .* got \(1.0,\) in layer 1, head 0"),
        ({"losses": [[[0.5, -1]]]}, "from 0 to 1e.06"),
        ({"losses": [[[0.5, True]]]}, "in layer 0, head 0"),
        ({"losses": [[[0.5, "1"]]]}, "in layer 0, head 0"),
        ({"losses": [[[0.5, math.nan]]]}, "got .0.5, nan."),
        ({"losses": [[[0.5, math.inf]]]}, "got .0.5, inf."),
        ({"losses": [[[0.5, 10**400]]]}, "in layer 0, head 0"),
        ({"losses": [[0.5, 0.25]]}, "in layer 0, head 0"),
        ({"losses": [[[0.5, 0.25]] * 9000]}, "at most 8192 heads, got 9000"),
    ],
    ids=lambda x: str(x)[:40],
)
def test_a_file_that_holds_no_needs_is_one_error(tmp_path, change, message):
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(GOOD | change))
    with pytest.raises(ValueError, match=rf"odd.json holds no needs of heads: .*{message}"):
        load_needs(path)


@pytest.mark.parametrize("text", ["", "[1]", "[" * 100_000, '{"format": 1}', "\0", '{"a": ' * 900 + "1" + "}" * 900])
def test_a_file_of_something_else_is_one_error(tmp_path, text):
    path = tmp_path / "odd.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"odd.json holds no needs of heads: it is no JSON object with format"):
        load_needs(path)


def test_a_file_that_is_no_text_or_too_large_is_one_error(tmp_path, monkeypatch):
    path = tmp_path / "odd.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"odd.json holds no needs of heads: .*utf-8"):
        load_needs(path)
    monkeypatch.setattr(needs, "MOST_BYTES", 50)
    path.write_text(json.dumps(GOOD))
    with pytest.raises(ValueError, match=f"it has {path.stat().st_size} bytes, and no measurement has more than 50"):
        load_needs(path)
    with pytest.raises(FileNotFoundError):
        load_needs(tmp_path / "none.json")


def test_the_package_carries_needs_by_model(tmp_path, monkeypatch):
    monkeypatch.setattr(needs, "files", lambda package: tmp_path)
    assert needs.packaged_needs(SOME.model) is None
    save_needs(tmp_path / "needs" / "some.json", SOME, {})
    save_needs(tmp_path / "needs" / "another.json", Needs("another", SOME.budgets, SOME.losses), {})
    (tmp_path / "needs" / "README.md").write_text("no needs")
    assert needs.packaged_needs(SOME.model) == SOME
    assert needs.packaged_needs("a third") is None


def test_what_the_package_carries_can_be_read():
    folder = resources.files("h2o_mlxlm") / "needs"
    carried = [f for f in folder.iterdir() if f.name.endswith(".json")] if folder.is_dir() else []
    for file in carried:
        found = load_needs(file)
        assert needs.packaged_needs(found.model) == found


def test_a_model_is_the_same_in_another_dtype_and_quantised(make_model):
    whole = needs_identity(make_model())
    cast, quantised, both = make_model(), make_model(), make_model()
    cast.set_dtype(mx.bfloat16)
    nn.quantize(quantised, group_size=32)
    nn.quantize(both, group_size=32)
    both.set_dtype(mx.bfloat16)
    assert any(isinstance(m, nn.QuantizedLinear) for m in quantised.modules())
    assert {needs_identity(m) for m in (cast, quantised, both)} == {whole}


def test_another_model_is_another(make_model):
    other, unnormed = make_model(), nn.Linear(4, 4, bias=False)
    norm = other.model.layers[1].input_layernorm
    norm.weight = norm.weight * 1.02
    known = [needs_identity(m) for m in (make_model(), other, make_model(num_hidden_layers=3))]
    assert len(set(known)) == 3
    with pytest.raises(ValueError, match="has no weights of one dimension"):
        needs_identity(unnormed)
