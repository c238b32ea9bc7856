"""``h2o-mlxlm bench``: what each level prints, that variants do equal work, and how times are summed up."""

import csv
import json
import statistics
import subprocess
import sys

import mlx.core as mx
import pytest

from h2o_mlxlm import Needs, needs
from h2o_mlxlm.benchmarks import layer, slopes, step, timing, variants, workload
from h2o_mlxlm.benchmarks.layer import Shape
from h2o_mlxlm.benchmarks.rows import append
from h2o_mlxlm.benchmarks.variants import VARIANTS, Room, chosen
from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.cli import main
from h2o_mlxlm.identity import needs_identity

SMALL = ["--kv-heads", "2", "--head-dim", "16"]
RANDOM = ["--random", "1,32,2,1"]
NARROW = [
    "full",
    "recency",
    "h2o",
    "h2o-books",
    "h2o-rewind",
    "h2o-key",
    "h2o-rolling",
]  # head_dim 16 is too narrow for quantized
CIRCUMSTANCES = {"machine", "chip", "device", "date", "versions"}

OF_LAYERS = {name: variant for name, variant in VARIANTS.items() if not variant.whole}


@pytest.fixture
def rows(capsys):
    """Run a level with ``--json`` and read its rows."""

    def rows(*arguments):
        assert main(["bench", *arguments, "--json"]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return rows


def assert_times(row):
    assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
    assert 0 < row["paired_q1"] <= row["paired_ratio"] <= row["paired_q3"]
    if row["variant"] == row["baseline"]:
        assert row["ratio"] == row["paired_ratio"] == 1.0


def test_step_takes_turns_and_says_under_what_circumstances(rows):
    got = rows("step", *SMALL, "--budget", "32", "48", "--steps", "5", "--dtype", "float16")
    assert [(row["budget"], row["variant"]) for row in got] == [(b, v) for b in (32, 48) for v in NARROW]
    for row in got:
        assert_times(row)
        assert row["versions"].keys() == {"mlx", "mlx-lm", "h2o-mlxlm"}
        assert {"dtype", "steps", "kv_heads", "group", "batch", *CIRCUMSTANCES} <= row.keys()
        assert row["baseline"] == "recency"
        assert row["context"] == row["budget"] * (4 if row["variant"] == "full" else 1)


def test_without_json_it_prints_a_line_for_each(capsys):
    assert main(["bench", "step", *SMALL, "--budget", "32", "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(NARROW)
    assert all("x recency, paired" in line for line in lines)


def test_step_fills_every_cache_and_bounded_ones_evict():
    """A full cache is what is timed: each step lets a row go, and nothing from the filling is still to do."""
    shape = Shape(2, 1, 64)
    caches = step.full_caches(OF_LAYERS, shape, 32, context=300)
    before = {name: c.evictions for name, c in caches.items() if isinstance(c, H2OKVCache)}
    for cache in caches.values():
        layer.call(cache, layer.drawn(shape, 1))
    assert before.keys() == {
        "h2o",
        "h2o-books",
        "h2o-rewind",
        "h2o-key",
        "h2o-rolling",
        "h2o-8bit",
        "h2o-4bit",
        "h2o-kivi",
        "h2o-gear",
    }
    assert all(caches[name].evictions == n + 1 for name, n in before.items())
    assert {name: caches[name].size() for name in ("full", "recency")} == {"full": 301, "recency": 32}
    assert caches["quantized"].offset == 301


def test_mlx_lm_caches_are_its_own():
    kinds = {name: type(VARIANTS[name].make(Room(32, 64))[0]).__name__ for name in OF_LAYERS}
    assert kinds["full"] == "KVCache"
    assert kinds["recency"] == "RotatingKVCache"
    assert kinds["quantized"] == "QuantizedKVCache"
    assert {kinds[name] for name in OF_LAYERS if name.startswith("h2o")} == {"H2OKVCache"}
    bits = {name: VARIANTS[f"h2o-{name}"].make(Room(32, 64))[0].forms[1].bits for name in ("8bit", "kivi", "key")}
    assert bits == {"8bit": 8, "kivi": 4, "key": None}


@pytest.mark.parametrize("budget", [1, 2, 8, 20, 512])
def test_any_budget_has_a_configuration(budget):
    assert variants.config_for(budget).budget == budget


def test_another_library_is_named_by_path(rows):
    path = "mlx_lm.models.cache:RotatingKVCache"
    plain = "mlx_lm.models.cache:KVCache"
    got = rows(
        *("step", *SMALL, "--budget", "32", "--steps", "3", "--methods", "recency"),
        *("--against", path, "--against", plain),
    )
    assert [row["variant"] for row in got] == ["recency", "RotatingKVCache", "KVCache"]
    assert variants.imported(path).make(Room(32, 16))[0].max_size == 32


def test_prefill(rows):
    got = rows(
        "prefill", *RANDOM, "--prompt", "40", "--budget", "16", "64", "--repeats", "2", "--prefill-step-size", "16"
    )
    assert [(row["budget"], row["variant"]) for row in got] == [
        (b, v) for b in (16, 64) for v in ("full", "recency", "h2o")
    ]
    for row in got:
        assert_times(row)
        assert row["peak_mib"] > 0
        assert row["tokens_per_s"] == pytest.approx(40e3 / row["median_ms"], rel=0.01)


def test_model_and_batch(rows):
    few = [*RANDOM, "--budget", "16", "--context", "24", "--steps", "2", "--methods", *NARROW]
    one, more = rows("model", *few), rows("batch", *few, "--batch", "1", "3")
    assert [(row["batch"], row["variant"]) for row in one + more] == [(b, v) for b in (1, 1, 3) for v in NARROW]
    for row in one + more:
        assert_times(row)
        assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["median_ms"], rel=0.01)
        assert row.keys() >= CIRCUMSTANCES


def test_prefill_leaves_what_generate_step_leaves():
    """The whole prompt, chunk by chunk, and its last token alone: the same next token."""
    from mlx_lm.generate import generate_step
    from mlx_lm.models.cache import make_prompt_cache

    model = workload.random_llama(2, 32, 2, 1)
    tokens = workload.tokens_for(model, 21)
    caches = make_prompt_cache(model)
    following = workload.prefill(model, caches, tokens, chunk=8)
    expected, _ = next(generate_step(tokens[0], model, prefill_step_size=8))
    assert following.item() == expected
    assert [c.offset for c in caches] == [21, 21]


def test_long(rows):
    got = rows("long", *RANDOM, "--budget", "40", "999", "--tokens", "100", "--window", "10")
    windows = [row for row in got if row["kind"] == "window"]
    assert [row["phase"] for row in windows] == ["below"] * 4 + ["above"] * 6 + ["below"] * 10
    assert all(row["active_mib"] > 0 for row in windows)
    fits = [row for row in got if row["kind"] == "fit"]
    assert [(row["budget"], row["phase"]) for row in fits] == [(40, "below"), (40, "above"), (999, "below")]
    times = [row["ms_per_token"] for row in windows[4:10]]
    assert fits[1]["last_over_second"] == pytest.approx(times[-1] / times[1], rel=0.01)


def test_memory(rows):
    got = rows("memory", *SMALL, "--budget", "32", "--prompt", "64", "--chunk", "32", "--steps", "80", "--window", "40")
    kinds = [(row["kind"], row.get("phase")) for row in got]
    levels = [("level", p) for p in ("below", "below", "above", "above")]
    assert kinds == [("held", "below"), ("held", "above"), ("prefill", None), *levels]
    assert got[2]["peak_mib"] <= got[2]["bound_mib"]


def test_slopes(rows, monkeypatch):
    monkeypatch.setattr(slopes, "bandwidth", lambda: (4e9, "sum"))
    got = rows(
        *("slopes", *SMALL, "--budget", "16", "32", "64", "--batches", "1", "2", "3", "--heads", "1", "2", "3"),
        *("--steps", "2", "--methods", "recency", "h2o"),
    )
    assert [(row["axis"], row["variant"]) for row in got] == [
        (axis, name) for axis in ("budget", "batch", "kv_heads") for name in ("recency", "h2o")
    ]
    floors = [row["floor_us"] * 4e3 for row in got[::2]]
    # Bytes of K and V: of a slot, of a sequence of 32 slots, of a KV head of 32 slots.
    assert floors == pytest.approx([2 * 2 * 16 * 4, 32 * 2 * 2 * 16 * 4, 32 * 2 * 16 * 4], rel=0.01)


def test_bandwidth_is_measured():
    speed, how = slopes.bandwidth(n_bytes=2**20, n_repeats=2)
    assert 1e6 < speed < 1e14
    assert how in ("sum", "matvec", "add")


# Times


def test_variants_take_turns_and_inputs_are_drawn_apart():
    calls = []
    steps = {name: lambda x, name=name: calls.append((name, x)) for name in "ab"}
    times = timing.in_turns(steps, 2, lambda i: i, warm_up=1)
    assert calls == [(name, i) for i in range(3) for name in "ab"]
    assert {name: len(t) for name, t in times.items()} == {"a": 2, "b": 2}


def test_the_paired_ratio_survives_a_machine_that_slows_down():
    base = [1.0, 1.0, 1.0, 9.0, 9.0]
    a, b = timing.summaries({"a": [2 * t for t in base], "b": base}, "b")
    assert (a["ratio"], a["paired_ratio"], a["paired_q1"], a["paired_q3"]) == (2.0, 2.0, 2.0, 2.0)
    assert (b["median_ms"], b["p10_ms"], b["p90_ms"]) == (1.0, 1.0, 9.0)


def test_a_line_has_the_textbook_error():
    x, y = [1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 5.0]
    line = timing.fit(x, y)
    assert line.slope == pytest.approx(1.1)
    residual = [b - line.intercept - line.slope * a for a, b in zip(x, y, strict=True)]
    assert line.slope_error == pytest.approx((sum(r * r for r in residual) / 2 / 5.0) ** 0.5)
    assert statistics.fmean(residual) == pytest.approx(0.0)


# The file


def test_out_appends_and_widens(tmp_path, rows):
    path = tmp_path / "rows.csv"
    argv = ["step", *SMALL, "--budget", "32", "--steps", "2", "--methods", "recency", "h2o", "--out", str(path)]
    got = rows(*argv) + rows(*argv)
    with path.open(newline="") as file:
        written = list(csv.DictReader(file))
    assert [r["variant"] for r in written] == [r["variant"] for r in got] == ["recency", "h2o"] * 2
    assert [float(r["median_ms"]) for r in written] == [r["median_ms"] for r in got]
    assert all(r["versions.mlx"] for r in written)
    append(path, [{"variant": "x", "new": 1}])
    with path.open(newline="") as file:
        widened = list(csv.DictReader(file))
    assert [r["new"] for r in widened] == [""] * 4 + ["1"]
    assert [r["variant"] for r in widened] == ["recency", "h2o"] * 2 + ["x"]


# Bad input


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["step", "--budget", "0"], "between"),
        (["step", "--steps", "x"], "number"),
        (["step", "--dtype", "int8"], "int8"),
        (["step", "--methods", "lru"], "lru"),
        (["model", "--random", "1,2,3"], "LAYERS,HIDDEN,HEADS,KV"),
        (["nothing"], "nothing"),
        ([], "LEVEL"),
    ],
)
def test_bad_flags_are_one_line(argv, part, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", *argv])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.err.count("\n") == 1
    assert part in captured.err


@pytest.mark.parametrize(
    ("argv", "part"),
    [
        (["step", "--head-dim", "16", "--methods", "quantized"], "multiple of 64, got 16"),
        (["step", "--methods", "h2o"], "'recency'"),
        (["step", "--against", "nowhere"], "package.module:Class"),
        (["step", "--against", "json:Nothing"], "package.module:Class"),
        (["slopes", "--budget", "32"], "at least 3"),
        (["model", "--random", "1,33,2,1"], "multiple of HEADS"),
        (["step", "--out", "/nowhere/x.csv"], "/nowhere/x.csv"),
    ],
)
def test_bad_values_are_one_line(argv, part, capsys):
    assert main(["bench", *argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert part in captured.err


def loaded_by(code, *names):
    """Which of these packages a fresh Python has loaded after this code."""
    code += f"\nimport sys; print(sorted({set(names)} & {{m.split('.')[0] for m in sys.modules}}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_importing_the_levels_does_not_import_mlx():
    names = "layer, long, memory, model, prefill, rows, slopes, step, timing, variants, workload"
    assert loaded_by(f"from h2o_mlxlm.benchmarks import {names}", "mlx", "mlx_lm", "h2o_core") == "[]"


def test_help_does_not_import_mlx():
    """Not even that of a level: the command line answers at once."""
    code = """
from h2o_mlxlm.cli import main
from h2o_mlxlm.identity import needs_identity
for argv in (["--help"], ["bench", "--help"], ["bench", "step", "--help"], ["bench", "long", "--help"]):
    try:
        main(argv)
    except SystemExit as stop:
        assert stop.code == 0
"""
    assert loaded_by(code, "mlx", "mlx_lm", "transformers", "huggingface_hub", "numpy") == "[]"


def test_a_draw_is_evaluated():
    shape = Shape(2, 3, 16, 2, "bfloat16")
    q, k, v = layer.drawn(shape, 4)
    assert (q.shape, k.shape, v.shape) == ((2, 6, 4, 16), (2, 2, 4, 16), (2, 2, 4, 16))
    assert {x.dtype for x in (q, k, v)} == {mx.bfloat16}
    assert shape.row_bytes == 2 * 2 * 2 * 16 * 2


@pytest.mark.parametrize("name", ["h2o-calibrated", "h2o-calibrated-layers"])
def test_calibrated_caches_are_those_of_a_model_that_was_measured(make_model, name, monkeypatch):
    with pytest.raises(ValueError, match="calibrated caches are for a whole model"):
        VARIANTS[name].make(Room(96, 64))
    model = make_model()
    with pytest.raises(ValueError, match="no needs of this model's heads come with h2o_mlxlm"):
        VARIANTS[name].make(Room(96, 16, model))
    assert name not in chosen(None, (), 64)
    assert list(chosen([name], (), 64)) == [name]
    measured = Needs(needs_identity(model), (8, 32), (((0.3, 0.1), (0.01, 0.001)), ((0.9, 0.5), (0.02, 0.01))))
    monkeypatch.setattr(needs, "packaged_needs", {needs_identity(model): measured}.get)
    caches = VARIANTS[name].make(Room(96, 16, model))
    groups = [[share.cache.config.budget for share in getattr(c, "shares", ())] or [c.config.budget] for c in caches]
    by_heads = measured.budgets_for(96, groups=1 if name.endswith("layers") else 3)
    assert groups == [list(dict.fromkeys(layer)) for layer in by_heads]
