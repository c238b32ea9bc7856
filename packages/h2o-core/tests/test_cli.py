"""The command line: what it prints and writes, and one line with exit code 2 for what it can't do."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import pytest

from h2o_core import H2OConfig, Recording, read_trace, simulate, summarize, write_trace
from h2o_core.cli import commands, inputs, main, plot, texts
from h2o_core.generators import GENERATORS, zipf
from h2o_core.scorer import scorer_kind, scorer_names
from h2o_core.variants import VARIANTS

SMALL = ["--steps", "40", "--heads", "2", "--seed", "1"]
CACHE = ["--budget", "24", "--n-sink", "2", "--grace", "4"]
FIELDS = {"n_sink": 2, "grace": 4}


@pytest.fixture
def run(capsys):
    """Run ``h2o-sim``: exit code, standard output, standard error."""

    def run(*arguments):
        try:
            code = main([str(x) for x in arguments])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def told(run):
    """Run with ``--json`` and read what it prints."""

    def told(*arguments):
        code, out, err = run(*arguments, "--json")
        assert (code, err, out.count("\n")) == (0, "", 1)
        return json.loads(out)

    return told


@pytest.fixture
def recorded(tmp_path):
    """A file with two layers of four query and two KV heads."""
    path = tmp_path / "trace.safetensors"
    q, k = (mx.random.normal((h, 30, 8), key=mx.random.key(h)) for h in (4, 2))
    write_trace(path, {n: Recording(None, q * (n + 1), k, None, 0.5) for n in range(2)})
    return path


def test_help_needs_no_mlx():
    script = "import sys\nfrom h2o_core.cli import main\ntry:\n main(sys.argv[1:])\nexcept SystemExit: pass\n"
    script += "print([m for m in sys.modules if m.split('.')[0] == 'mlx'])"
    for arguments in (["--help"], ["run", "--help"], ["compare", "--help"], ["generate", "--help"], ["run"]):
        command = [sys.executable, "-c", script, *arguments]
        result = subprocess.run(command, capture_output=True, text=True, check=True)
        assert result.stdout.splitlines()[-1] == "[]"
        assert ("h2o-sim" in result.stdout) or result.stderr.startswith("h2o-sim run: ")


def test_run_prints_what_simulate_returns(told):
    report = told("run", "zipf", *SMALL, *CACHE, "--decay", "0.9")
    config = H2OConfig(24, **FIELDS, decay=0.9)
    made = zipf(40, 2, seed=1)
    trace = simulate(made.attention, config)
    assert report["kept"] == trace.kept[-1].tolist()
    assert report["config"]["decay"] == 0.9
    assert (report["steps"], report["evictions"]) == (40, 16)
    for name, numbers in summarize(trace, made.attention, 1)._asdict().items():
        assert report[name] == pytest.approx(numbers.mean().item(), abs=1e-5)


def test_run_replays_a_layer_of_a_file(told, recorded, tmp_path):
    out = tmp_path / "kept.safetensors"
    flags = ["--layer", "1", "--budget", "12", "--n-sink", "1", "--grace", "2", "--prompt-len", "5", "--chunk", "3"]
    report = told("run", recorded, *flags, "--out", out)
    config = H2OConfig(12, n_sink=1, grace=2)
    trace = simulate(read_trace(recorded, 1).rows(), config, 5, 2, chunk=3)
    assert report["kept"] == trace.kept[-1].tolist()
    written = mx.load(str(out))
    assert written.keys() == {"kept", "retained", "evicted"}
    assert mx.array_equal(written["kept"], trace.kept)
    heads = told("run", recorded, *flags, "--kv-heads", "4")["kept"]
    assert len(heads) == 4


def test_holding_the_prompt_reaches_the_configuration(told):
    flags = [*CACHE, "--long-share", "0.5", "--no-evict-during-prefill"]
    config = told("run", "uniform", *SMALL, *flags)["config"]
    assert (config["evict_during_prefill"], config["long_share"]) == (False, 0.5)


def test_a_batch_is_told_as_one(told, tmp_path):
    path = tmp_path / "batch.safetensors"
    write_trace(path, Recording(mx.stack([zipf(30, 2, seed=s).attention.whole() for s in range(3)])))
    report = told("run", path, *CACHE)
    assert [len(heads) for heads in report["kept"]] == [2, 2, 2]
    assert report["evictions"] == 6


def test_a_prompt_that_never_fits_the_budget_has_no_kept_set(told):
    report = told("run", "uniform", *SMALL, *CACHE, "--no-evict-during-prefill", "--prompt-len", "40")
    assert (report["age"], report["frozen"], report["evictions"], report["kept"]) == (None, None, 0, [[], []])


def test_compare_runs_several_configurations(told, run):
    asked = ["--config", "n_sink=0 grace=4", "--config", "text-generation", "--config", "algorithm-1 budget=8 grace=2"]
    results = told("compare", "shift", *SMALL, "--budget", "16", *asked)["results"]
    assert [r["name"] for r in results] == asked[1::2]
    assert [(r["config"]["budget"], r["config"]["grace"]) for r in results] == [(16, 4), (16, 8), (8, 2)]
    assert [r["config"]["evict_during_prefill"] for r in results] == [True, False, True]


def test_compare_runs_the_defaults_and_every_variant_if_none_is_named(run):
    size = H2OConfig().budget
    code, out, err = run("compare", "recency", "--steps", size + 16, "--heads", "1")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[0].split() == ["retained", "best", "overlap", "age", "frozen", "evictions"]
    assert [line.split()[0] for line in lines[1:]] == ["default", *VARIANTS]
    assert lines[1].split()[-1] == "16"


README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_the_readmes_tables(told, monkeypatch):
    """Two rows of each: the best and the worst."""
    monkeypatch.chdir(Path(__file__).parents[1])
    commands = [shlex.split(line)[1:] for line in README.splitlines() if "--scorers" in line and "h2o-sim" in line]
    tables = re.findall(r"\| \| mass retained .*\n\|---.*\n((?:\|.*\n)+)", README)
    assert len(commands) == len(tables) == 2
    for command, table in zip(commands, tables, strict=True):
        rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()]
        assert {row[0] for row in rows} <= {*scorer_names(), "h2o decay=1.0"}
        chosen = [rows[0], rows[-1]]
        asked = command[: command.index("--scorers")]
        for row in chosen:
            asked += ["--config", row[0]]
        for row, result in zip(chosen, told(*asked)["results"], strict=True):
            found = [result[name] for name in ("retained", "best", "overlap", "age", "frozen")]
            # Sums in another order may keep another of two tokens now and then.
            assert found == pytest.approx([float(x) for x in row[1:]], rel=0.02, abs=0.01)


def test_every_scorer_that_can_be_fed_is_compared(told, run, tmp_path):
    path, more = tmp_path / "qkv.safetensors", tmp_path / "inputs.safetensors"
    q, k, v = (mx.random.normal((h, 30, 8), key=mx.random.key(h)) for h in (4, 2, 2))
    mx.save_safetensors(str(more), {"reconstruction": mx.random.uniform(shape=(2, 12))})
    few = ["--scorers", "--budget", "12", "--prompt-len", "12"]

    def names(*arguments):
        code, out, err = run("compare", *arguments, *few)
        assert code == 0
        return [line.split()[0] for line in out.splitlines()[1:]], err.splitlines()

    write_trace(path, Recording(None, q, k, v, 0.5))
    assert names(path, "--inputs", more) == (scorer_names(), [])
    found, left = names(path)
    assert found == [name for name in scorer_names() if name != "kvzip"]
    assert left == ["left out: scorer 'kvzip' needs reconstruction from the caller: give it in inputs"]
    write_trace(path, Recording(None, q, k, None, 0.5))
    assert len(names(path)[1]) == 3
    found, left = names("zipf", "--steps", "30", "--heads", "2")
    assert found == [n for n in scorer_names() if not scorer_kind(n)().needs & {"keys", "reconstruction"}]
    assert len(found) + len(left) == len(scorer_names())


def test_a_scorer_is_asked_for_with_its_parameters(told):
    report = told("run", "zipf", *SMALL, *CACHE, "--scorer", "morphkv window=3 fusion=max")
    assert report["name"] == "morphkv"
    assert report["config"]["scorer"] == {"name": "morphkv", "window": 3, "fusion": "max"}
    found = texts.configs_from(["snapkv window=16 pool=3 grace=5", "h2o by_age=true decay=1", "tova"], 64)
    first, second, third = found.values()
    assert first == H2OConfig(64, grace=5, scorer={"name": "snapkv", "window": 16, "pool": 3})
    assert second == H2OConfig(64, decay=1, scorer={"name": "h2o", "by_age": True})
    assert third == H2OConfig(64, scorer="tova")


def test_the_readmes_commands(run, tmp_path, monkeypatch):
    lines = [line for line in README.splitlines() if line.startswith("h2o-sim ") and "--scorers" not in line]
    monkeypatch.chdir(tmp_path)
    assert [shlex.split(line)[1] for line in lines] == ["compare", "run", "generate"]
    for line in lines:
        code, out, err = run(*shlex.split(line)[1:])
        assert (code, err) == (0, "")
        assert out
    assert read_trace("zipf.safetensors").attention.shape == (4, 256, 256)


@pytest.mark.parametrize("kind", inputs.KINDS)
def test_what_is_generated_is_a_trace_with_its_truth(told, run, tmp_path, kind):
    path = tmp_path / "made.safetensors"
    report = told("generate", kind, "--steps", "80", "--heads", "2", "--seed", "5", "--out", path)
    made = GENERATORS[kind](n_steps=80, n_heads=2, seed=5)
    assert report == {"out": str(path), "shape": [2, 80, 80], "truth": [h._asdict() for h in made.truth]}
    assert mx.array_equal(read_trace(path).attention, made.attention.whole())
    about = mx.load(str(path), return_metadata=True)[1]
    assert json.loads(about["truth"]) == report["truth"]
    assert run("run", path, *CACHE)[0] == 0
    code, out, _ = run("generate", kind, "--steps", "80", "--out", path)
    assert (code, out) == (0, f"{path}: {kind}, 4 heads, 80 steps, {len(made.truth)} tokens planted\n")


def test_the_kinds_are_the_generators():
    assert tuple(GENERATORS) == inputs.KINDS


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "none.safetensors"], "no trace at none.safetensors"),
        (["run", "zipf", "--layer", "1"], "--layer is for a trace in a file, got zipf"),
        (
            ["run", "zipf", "--budget", "20", "--n-sink", "4", "--grace", "16"],
            "n_sink=4, grace=16, budget=20: raise budget above 20",
        ),
        (["run", "zipf", "--budget", "x"], "argument --budget: invalid int value: 'x'"),
        (["run", "zipf", "--prompt-len", "1200"], "--prompt-len must be between 1 and the 1024 steps of the trace"),
        (["run", "zipf", "--prompt-len", "0"], "--prompt-len must be between 1 and the 1024 steps"),
        (["run", "zipf", "--chunk", "0"], "chunk must be a number of rows"),
        (["run", "zipf", "--kv-heads", "3"], "n_kv_heads must divide the 4 query heads, got 3"),
        (["run", "zipf", "--kv-heads", "0"], "n_kv_heads must divide the 4 query heads, got 0"),
        (["run", "zipf", "--steps", "0"], "n_steps and n_heads must be at least 1, got 0 and 4"),
        (["run", "zipf", *SMALL, "--out", "x.npz"], "--out is a file that ends in .safetensors, got x.npz"),
        (["run", "zipf", *SMALL, *CACHE, "--out", "no/x.safetensors"], "no/x.safetensors can't be written"),
        (["generate", "zipf", "--out", "x.npz"], "ends in .safetensors, got x.npz"),
        (["generate", "other", "--out", "x.safetensors"], "invalid choice: 'other'"),
        (["compare", "zipf", "--config", "best"], "one of algorithm-1, text-generation, overwriting, or none"),
        (["compare", "zipf", "--config", "algorithm-1 overwriting"], "is one of"),
        (["compare", "zipf", "--config", "ratio=2"], "'ratio' is no field of H2OConfig: there are budget, n_sink"),
        (["compare", "zipf", "--config", "decay=2"], r"decay must be in (0, 1], got 2"),
        (["compare", "zipf", "--config", "decay=x"], "decay must be a number in (0, 1], got 'x'"),
        (["compare", "zipf", "--config", "budget=2.5"], "budget must be an integer number of tokens, got 2.5"),
        (["compare", "zipf", "--config", "snapkv size=3"], "'size' is no field of H2OConfig: there are budget, n_sink"),
        (["compare", "zipf", "--config", "tova snapkv"], "or a scorer (cam, curdkv, "),
        (["compare", "zipf", "--config", "snapkv pool=4"], "pool of scorer 'snapkv' must be odd, got 4"),
        (["compare", "zipf", "--config", "tova decay=0.9"], "decay is for scorers that sum mass, and 'tova' does not"),
        (
            ["compare", "zipf", "--config", "l2norm budget=20"],
            "'l2norm' needs keys, and this trace has attention alone",
        ),
        (["run", "zipf", *SMALL, *CACHE, "--scorer", "best"], "scorer must be one of 'cam', "),
        (["run", "zipf", "--scorer", "tova size=2"], "'size' is no parameter of scorer 'tova'"),
        (["run", "zipf", "--inputs", "none.safetensors"], "--inputs none.safetensors is no safetensors file"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_input_is_one_line(run, arguments, message):
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("h2o-sim")
    assert message in err


def test_a_configuration_is_read_as_what_its_field_is():
    size = H2OConfig().budget
    found = texts.configs_from(["evict_during_prefill=false decay=1 queries=key grace=9", "", "default n_sink=0"], size)
    first, plain, named = found.values()
    assert first == H2OConfig(grace=9, decay=1, queries="key", evict_during_prefill=False)
    assert plain == H2OConfig()
    assert named == H2OConfig(n_sink=0)
    assert list(found)[1] == "default"
    assert texts.configs_from(["overwriting budget=16"], 64).popitem()[1].budget == 15


def test_steps_are_counted_for_someone_who_watches(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    list(inputs.counted(zipf(40, 1).attention, "h2o"))
    assert capsys.readouterr().err == "\rh2o: 40 of 40 steps\n"


def test_an_interrupt_is_130(run, monkeypatch):
    monkeypatch.setattr(commands, "_replayed", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    assert run("run", "zipf", *SMALL, *CACHE)[0] == 130


# Pictures


def test_without_matplotlib_one_line_says_how_to_get_it(run, monkeypatch):
    monkeypatch.setattr(plot, "find_spec", lambda name: None)
    code, out, err = run("compare", "zipf", *SMALL, "--plot", "out.png")
    assert (code, out, err) == (2, "", 'h2o-sim: --plot needs matplotlib: pip install "h2o-core[plot]"\n')


@pytest.fixture
def drawn(monkeypatch):
    """What a matplotlib that draws nothing is asked to draw: it is no dependency of the tests."""
    asked = []

    class Axes:
        def __init__(self, name):
            self.name = name

        def __getattr__(self, method):
            return lambda *args, **kwargs: asked.append((self.name, method, args, kwargs))

    class Figure(Axes):
        def __init__(self, **kwargs):
            super().__init__("figure")

        def subplot_mosaic(self, rows, height_ratios):
            assert len(rows) == len(height_ratios)
            return {name: Axes(name) for row in rows for name in row}

    module = ModuleType("matplotlib.figure")
    module.Figure = Figure
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    monkeypatch.setattr(plot, "find_spec", lambda name: object())
    return asked


def test_a_picture_has_a_curve_and_a_map_for_each_cache(run, drawn):
    code, _, err = run(
        "compare",
        "zipf",
        *SMALL,
        "--budget",
        "24",
        "--config",
        "n_sink=2 grace=4",
        "--config",
        "algorithm-1",
        "--plot",
        "a.png",
    )
    assert (code, err) == (0, "")
    curves = [args for name, method, args, _ in drawn if (name, method) == ("mass", "plot")]
    maps = [args[0] for name, method, args, _ in drawn if method == "imshow"]
    assert ("figure", "savefig", ("a.png",), {}) in drawn
    assert len(curves) == len(maps) == 2
    trace = simulate(zipf(40, 2, seed=1).attention, H2OConfig(24, **FIELDS))
    steps, mass = curves[0]
    assert len(steps) == len(mass) == 8
    assert sum(mass) / 8 == pytest.approx(trace.retained.mean().item(), abs=1e-5)
    assert (len(maps[0]), len(maps[0][0])) == (40, 40)
    for step, row in enumerate(maps[0]):
        held = trace.kept[step].tolist()
        assert row == [sum(p in head for head in held) / 2 for p in range(40)]
    assert (
        run("compare", "zipf", *SMALL, "--plot", "a.txt")[2] == "h2o-sim: --plot draws .png, .svg or .pdf, got a.txt\n"
    )


def test_a_long_map_is_thinned_out(monkeypatch):
    monkeypatch.setattr(plot, "_MOST", 16)
    trace = simulate(zipf(40, 1).attention, H2OConfig(24, **FIELDS))
    rows = plot.map_of(trace)
    assert (len(rows), len(rows[0])) == (14, 14)
    with pytest.raises(ValueError, match="a trace with kept positions"):
        plot.map_of(trace._replace(kept=None))
