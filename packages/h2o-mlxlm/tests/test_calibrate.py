"""``h2o-mlxlm calibrate``: what bounding a head costs beside a naive float64 cache, rows that go on, the command."""

import csv
import json
import math

import mlx.core as mx
import pytest
from mlx_lm.models import gemma3_text, llama

from h2o_core.conformance import Head
from h2o_mlxlm import H2OConfig, Needs, load_needs
from h2o_mlxlm.cli import calibrate, main
from h2o_mlxlm.evaluation import calibration
from h2o_mlxlm.evaluation.loss import Shape
from h2o_mlxlm.evaluation.replay import Handed
from h2o_mlxlm.evaluation.results import Rows
from h2o_mlxlm.identity import needs_identity

SHAPE = Shape(context=26, scored=22, batch=2, prefill_step_size=16)
BUDGETS = [6, 12]
CALLS = [16, 9, 1, 16, 5]  # the context in calls of 16 but for its last token, then the scored ones
TEXT = "The quick brown fox jumps over the lazy dog. A stitch in time saves nine! "


class Naive:
    """A layer's cache: a list of rows for each head, in Python floats."""

    def __init__(self, budgets, scale):
        configs = [H2OConfig(budget, evict_during_prefill=False) for budget in budgets]
        self.heads, self.offset = [Head(config, scale) for config in configs], 0

    def make_mask(self, N, return_array=False, window_size=None):
        return None

    def update_and_fetch(self, keys, values):
        self.rows = keys[0].tolist(), values[0].tolist()
        self.offset += keys.shape[2]
        return keys, values

    def attend(self, queries):
        q, group = queries[0].tolist(), queries.shape[1] // len(self.heads)
        outs = [
            head.call(q[i * group : (i + 1) * group], *(rows[i] for rows in self.rows))
            for i, head in enumerate(self.heads)
        ]
        return mx.array([row for out in outs for row in out])[None]


def naive_divergence(model, window, budgets):
    """KL to the full cache of one window; budgets of all heads, by layer."""
    said = []
    for of_layers in ([[10**6] * 2] * 2, budgets):
        caches = [Naive(of_heads, model.layers[0].self_attn.scale) for of_heads in of_layers]
        ends = [sum(CALLS[: i + 1]) for i in range(len(CALLS))]
        calls = [
            model(window[None, end - n : end], cache=caches)[0].tolist() for n, end in zip(CALLS, ends, strict=True)
        ]
        said.append([normal(logits) for call in calls for logits in call][SHAPE.context - 1 :])
    full, other = said
    each = [
        math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True)) for p, q in zip(full, other, strict=True)
    ]
    assert len(each) == SHAPE.scored
    return math.fsum(each) / len(each)


def normal(logits):
    top = max(logits)
    total = top + math.log(math.fsum(math.exp(x - top) for x in logits))
    return [x - total for x in logits]


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


def windows_of(n, key=3):
    return mx.random.randint(3, 260, (n, SHAPE.context + SHAPE.scored), key=mx.random.key(key))


def test_a_head_bounded_alone_costs_what_it_does_in_a_naive_cache(model, monkeypatch):
    monkeypatch.setattr(calibration, "CALL", 16)
    windows = windows_of(2)
    read = calibration.Read(model, windows, SHAPE)
    places = [(0, 1, 12), (1, 0, 6)]
    found = [read.divergence(*place) for place in places]
    # Whatever ran before leaves the read context as it was.
    assert [read.divergence(*place) for place in places] == found
    monkeypatch.setattr(llama, "scaled_dot_product_attention", lambda queries, *_, cache, **__: cache.attend(queries))
    for (layer, head, budget), costs in zip(places, found, strict=True):
        budgets = [[10**6] * 2, [10**6] * 2]
        budgets[layer][head] = budget
        for window, cost in zip(windows, costs, strict=True):
            expected = naive_divergence(model, window, budgets)
            assert expected > 1e-3
            assert math.isclose(cost, expected, rel_tol=1e-3)


def test_heads_of_several_shapes_and_nothing_to_lose(model, make_model):
    assert calibration.heads_of(model) == [2, 2]
    assert calibration.heads_of(make_model(num_hidden_layers=1, num_key_value_heads=1)) == [1]
    read = calibration.Read(model, windows_of(1), SHAPE)
    assert read.divergence(0, 0, read.unbounded) == [0.0]


def test_layers_below_the_bounded_one_are_not_computed_again(make_model):
    model = make_model(num_hidden_layers=3)
    classes = [type(layer) for layer in model.layers]
    read = calibration.Read(model, windows_of(2), SHAPE)
    assert [type(layer) for layer in model.layers] == classes
    found = [read.divergence(*place) for place in ((1, 0, 6), (2, 1, 6))]
    down = model.layers[0].mlp.down_proj
    whole, down.weight = down.weight, down.weight * mx.nan
    assert [read.divergence(*place) for place in ((1, 0, 6), (2, 1, 6))] == found
    assert math.isnan(read.divergence(0, 0, 6)[0])
    assert [type(layer) for layer in model.layers] == classes
    # Where nothing is known they are.
    down.weight = whole
    read.handed.inputs = [[] for _ in model.layers]
    assert read.divergence(1, 0, 6) == pytest.approx(found[0], rel=1e-5)


def test_what_a_layer_is_handed_with_anothers_cache_is_not_taken_for_its_own(model):
    handed, caches = Handed(model), [object(), object()]
    x = mx.zeros((1, 1, 64))
    with handed.recorded(caches):
        model.layers[0](x, None, None)
        with pytest.raises(AttributeError):
            model.layers[0](x, None, caches[1])
        with pytest.raises(AttributeError):
            model.layers[1](x, cache=caches[1])
    assert [len(of_layer) for of_layer in handed.inputs] == [0, 1]


def sliding():
    """One layer in three attends to everything."""
    args = {"hidden_size": 32, "num_hidden_layers": 3, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    args |= {"vocab_size": 270, "num_key_value_heads": 2, "sliding_window": 8, "sliding_window_pattern": 3}
    return gemma3_text.Model(gemma3_text.ModelArgs(model_type="gemma3_text", **args))


def test_layers_with_a_sliding_window_are_left_alone():
    model = sliding()
    assert calibration.heads_of(model) == [2]
    read = calibration.Read(model, windows_of(2), SHAPE)
    assert read.divergence(0, 1, read.unbounded) == [0.0, 0.0]
    assert all(cost > 0 for cost in read.divergence(0, 1, 6))


def todo_of(model, texts, shape=SHAPE):
    return list(calibration.units(texts, {name: f"run {name}" for name in texts}, [2, 2], BUDGETS, shape))


def rows_in(tmp_path):
    return Rows(tmp_path / "rows.csv", calibration.COLUMNS, calibration.KEY)


def test_rows_go_on_where_they_ended(model, tmp_path, monkeypatch):
    texts = {"one": windows_of(3, 1), "two": windows_of(1, 2)}
    todo, ran = todo_of(model, texts), []
    # Two batches of the first text, one of the second; four heads, two budgets.
    assert len(todo) == 3 * 4 * 2
    real = calibration.Read.divergence
    monkeypatch.setattr(calibration.Read, "divergence", lambda self, *where: ran.append(where) or real(self, *where))
    calibration.measure(model, todo[:7], rows_in(tmp_path), SHAPE)
    done = []
    calibration.measure(model, todo, rows_in(tmp_path), SHAPE, lambda: done.append(len(ran)))
    assert ran == [unit[-3:] for unit in todo]
    assert done == [7] * 7 + list(range(8, 25))
    written = (tmp_path / "rows.csv").read_text().splitlines()
    assert len(written) == 1 + 4 * 4 * 2
    calibration.measure(model, todo, rows_in(tmp_path), SHAPE)
    # In other batches they are the same rows.
    calibration.measure(model, todo_of(model, texts, SHAPE._replace(batch=3)), rows_in(tmp_path), SHAPE)
    assert len(ran) == 24
    assert (tmp_path / "rows.csv").read_text().splitlines() == written


def test_each_text_has_an_equal_say(model, tmp_path):
    todo, rows = todo_of(model, {"one": windows_of(2), "two": windows_of(2)}), rows_in(tmp_path)
    # The second text loses a hundred times as much, and its windows 0 and twice that. In one head nothing is lost.
    kl = {(0, 0): (0.3, 0.2), (0, 1): (0.1, 0.05), (1, 0): (0.4, 0.15), (1, 1): (-1e-9, 0.0)}
    for unit in todo:
        times = (1, 1) if unit.text == "one" else (0, 200)
        own = kl[unit.layer, unit.head][BUDGETS.index(unit.budget)]
        rows.append(key | {"kl": t * own} for key, t in zip(unit.identities(), times, strict=True))
    needs = calibration.needs_of("a model", todo, rows)
    assert (needs.model, needs.budgets) == ("a model", (6, 12))
    expected = [[[0.75, 0.5], [0.25, 0.125]], [[1.0, 0.375], [0, 0]]]
    for of_layer, own in zip(needs.losses, expected, strict=True):
        for head, losses in zip(of_layer, own, strict=True):
            assert head == pytest.approx(losses, rel=1e-6)


def test_a_text_that_loses_nothing_is_refused(model, tmp_path):
    todo, rows = todo_of(model, {"one": windows_of(1)}), rows_in(tmp_path)
    for unit in todo:
        rows.append(key | {"kl": 0.0} for key in unit.identities())
    with pytest.raises(ValueError, match="text 'one' loses nothing with any head at 12 tokens: give more --context"):
        calibration.needs_of("a model", todo, rows)


@pytest.fixture
def run(tiny_folder, capsys, tmp_path):
    """Run the command on the tiny model: exit code, standard output, standard error, the folder."""
    (tmp_path / "one.txt").write_text(TEXT * 3, encoding="utf-8")

    def run(*arguments, model=str(tiny_folder)):
        out = tmp_path / "out"
        text = ["--text", str(tmp_path / "one.txt")]
        try:
            code = main(["calibrate", "--model", model, "--out", str(out), *text, *arguments])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr(), out

    return run


SMALL = ["--context", "26", "--scored", "6", "--budgets", "12", "6", "12"]


def test_the_command(run, model, make_model):
    code, out, err, folder = run(*SMALL)
    assert (code, err) == (0, "")
    rows = list(csv.DictReader((folder / "rows.csv").read_text().splitlines()))
    assert len(rows) == 2 * 4 * 2
    needs = load_needs(folder / "needs.json")
    assert needs.model == needs_identity(make_model(tie_word_embeddings=False))
    assert needs.budgets == (6, 12)
    assert [len(layer) for layer in needs.losses] == [2, 2]
    # The middle of two budgets is the upper one.
    assert sum(head[1] for layer in needs.losses for head in layer) == pytest.approx(1, abs=1e-3)
    told = json.loads((folder / "needs.json").read_text())["about"]
    assert {"machine", "device", "versions", "date", "asked", "texts"} <= told.keys()
    assert told["asked"]["scored"] == 6
    lines = out.splitlines()
    assert lines[0].split("  ")[0] == "needs most room"
    assert lines[-1].startswith("these 4")
    assert "100.0 %" in lines[-1]
    again = run(*SMALL)
    assert again[:2] == (0, out)
    assert len((folder / "rows.csv").read_text().splitlines()) == len(rows) + 1


def test_the_table_shows_ten_heads_and_the_rest():
    losses = [[(0.1 * n, 0.02 * n), (0.01, 0.002)] for n in range(1, 9)]
    needs = Needs("a model", (32, 128), tuple(map(tuple, losses)))
    lines = calibrate.table_of(needs).splitlines()
    assert [line.split("  ")[0] for line in lines] == [
        "needs most room",
        *(f"layer {n}, head 0" for n in range(7, -1, -1)),
        "layer 0, head 1",
        "layer 1, head 1",
        "these 10",
        "the other 6",
    ]
    given = [needs.budgets_for(budget) for budget in (64, 128, 256)]
    assert lines[1].split()[-3:] == [str(budgets[7][0]) for budgets in given]
    # Shares are those at the middle budget.
    assert lines[1].split()[4:6] == ["16.0", "%"]
    assert lines[-1].split()[3:5] == ["1.2", "%"]
    assert lines[-1].split()[-1] == f"{sum(layer[1] for layer in given[2][2:]) / 6:.0f}"


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--budgets", "32"], "read off two or more, got 32 alone"),
        (["--budgets", "32", "2000"], "of 1024 tokens of context 2000 lose none"),
        (["--budgets", "4", "32"], "n_sink + grace must be below budget"),
        (["--budgets", "0", "32"], "--budgets: must be"),
        (["--windows", "0"], "--windows"),
        (["--text", "/no/such/file"], "/no/such/file"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_before_the_model_is_looked_for(run, arguments, part):
    code, out, err, folder = run(*arguments, model="/no/such/model")
    assert (code, out, folder.exists()) == (2, "", False)
    assert len(err.splitlines()) == 1
    assert part in err
