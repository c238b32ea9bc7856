"""``h2o-mlxlm eval``: flags, files, tables, and one line for what it can't do."""

import csv
import json
import subprocess
import sys

import pytest

from h2o_mlxlm.cli import main
from h2o_mlxlm.evaluation import retrieval

TEXT = "The quick brown fox jumps over the lazy dog. A stitch in time saves nine! "
LOSS = ["--context", "30", "--scored", "6", "--windows", "3", "--batch", "2", "--budgets", "12", "16"]
SMALL = ["--settings", "n_sink=2 grace=4"]


@pytest.fixture
def texts(tmp_path):
    for name, text in (("one", TEXT), ("two", TEXT[::-1])):
        (tmp_path / f"{name}.txt").write_text(text * 4, encoding="utf-8")
    return [str(tmp_path / "one.txt"), str(tmp_path / "two.txt")]


@pytest.fixture
def run(tiny_folder, capsys, tmp_path):
    """Run ``eval`` on the tiny model: exit code, standard output, standard error, rows, summary."""

    def run(kind, *arguments, model=str(tiny_folder), out=tmp_path / "out"):
        try:
            code = main(["eval", kind, "--model", model, "--out", str(out), *arguments])
        except SystemExit as exit_:
            code = exit_.code
        lines = (out / "rows.csv").read_text().splitlines() if (out / "rows.csv").exists() else []
        told = json.loads((out / "summary.json").read_text()) if (out / "summary.json").exists() else None
        return code, *capsys.readouterr(), list(csv.DictReader(lines)), told

    return run


def test_loss(run, texts, tmp_path):
    code, out, err, rows, told = run("loss", "--text", *texts, *LOSS, *SMALL)
    assert (code, err) == (0, "")
    # Two texts, three windows, two methods, two budgets.
    assert len(rows) == 24
    assert {row["settings"] for row in rows} == {"", "grace=4 n_sink=2"}
    assert all(float(row["loss"]) > 0 and int(row["tokens_kept"]) in (12, 16) for row in rows)
    assert len(list((tmp_path / "out" / "full").iterdir())) == 6
    assert [(e["budget"], e["method"]) for e in told["results"]] == [
        (b, name) for b in (12, 16) for name in ("recency", "h2o")
    ]
    assert {"model", "machine", "device", "versions", "date", "asked", "texts"} <= told.keys()
    assert told["asked"]["context"] == 30
    assert "h2o grace=4 n_sink=2" in out
    assert "share of recency" in out
    again = run("loss", "--text", *texts, *LOSS, *SMALL)
    assert again[:2] == (0, out)
    assert again[3] == rows


def test_loss_with_ragged_budgets(run, texts):
    arguments = ["--methods", "h2o", "pyramid", "adaptive", "--budgets", "12", *SMALL]
    code, _, _, rows, _ = run("loss", "--text", texts[0], *LOSS, *arguments)
    assert code == 0
    kept, held = ({row["method"]: int(row[name]) for row in rows} for name in ("tokens_kept", "cache_bytes"))
    # Of the layer or head with the most. Half of six heavy hitters more below, and as many fewer above.
    assert (kept["h2o"], kept["pyramid"]) == (12, 15)
    assert 12 <= kept["adaptive"] <= 15
    # Two layers count the tokens seen for each of two heads, not once.
    assert held["pyramid"] == held["h2o"] == held["adaptive"] - 2 * 4


def test_loss_with_scorers(run, texts):
    arguments = ["--methods", "h2o", "tova", "snapkv window=4", "--budgets", "12", *SMALL]
    code, out, _, rows, _ = run("loss", "--text", texts[0], *LOSS, *arguments)
    assert code == 0
    losses = {row["method"]: row["loss"] for row in rows}
    assert list(losses) == ["h2o", "tova", "snapkv window=4"]
    assert len(set(losses.values())) == 3
    assert len({row["config"] for row in rows}) == 3
    assert "snapkv window=4 grace=4 n_sink=2" in out


def test_loss_with_lots_and_a_label(run, texts):
    arguments = ["--methods", "random", "--budgets", "12", *SMALL, "--seeds", "0", "1", "--label", "tried"]
    code, out, _, rows, told = run("loss", "--text", texts[0], *LOSS, *arguments)
    assert code == 0
    assert {(row["seed"], row["label"]) for row in rows} == {("0", "tried"), ("1", "tried")}
    assert len(told["results"]) == 1
    assert "random grace=4 n_sink=2 tried" in out


def test_generation(run, tmp_path):
    (tmp_path / "prompts").write_text("hello you\nhello me\n\nhello you\n", encoding="utf-8")
    arguments = ["--prompts", str(tmp_path / "prompts"), "--tokens", "40", "--budgets", "20", *SMALL]
    code, out, err, rows, told = run("generation", *arguments)
    assert (code, err) == (0, "")
    assert [row["tokens"] for row in rows] == ["40"] * 9
    assert {row["tokens_kept"] for row in rows if row["method"] != "full"} == {"20"}
    names = {file.name for file in (tmp_path / "out" / "texts").iterdir()}
    assert len(names) == 9
    assert {"full-0-00.txt", "recency-20-01.txt", "h2o-20-grace=4_n_sink=2-02.txt"} <= names
    assert [(e["name"], e["texts"]) for e in told["results"]] == [
        ("full", 3),
        ("recency", 3),
        ("h2o grace=4 n_sink=2", 3),
    ]
    assert "least variety" in out
    assert run("generation", *arguments)[3] == rows


def test_generation_that_is_sampled_runs_every_method_with_each_seed(run):
    arguments = ["--n-prompts", "2", "--tokens", "5", "--temp", "0.7", "--seeds", "0", "1", "--methods", "full"]
    code, _, _, rows, told = run("generation", *arguments)
    assert (code, len(rows), len(told["results"])) == (0, 4, 1)
    assert {row["seed"] for row in rows} == {"0", "1"}


def test_retrieval(run, texts, monkeypatch):
    monkeypatch.setattr(
        retrieval, "_answers", lambda model, tokenizer, caches, cell, *_: [row.key for row in cell.rows]
    )
    monkeypatch.setattr(retrieval, "sizes", lambda *_: {"cache_bytes": 0, "tokens_kept": 0})
    arguments = ["--text", texts[0], "--lengths", "400", "410", "--depths", "0", "1", "--trials", "3"]
    code, out, err, rows, told = run("retrieval", *arguments)
    assert (code, err) == (0, "")
    # Two forms, two depths, two lengths, three keys; the full cache, recency, and ours with either prefill.
    assert len(rows) == 2 * 2 * 2 * 3 * 4
    assert [e["name"] for e in told["results"]] == [
        "full",
        "recency",
        "h2o evict_during_prefill=True",
        "h2o evict_during_prefill=False",
    ]
    assert out.count("filler: 12 of 12\ndepth  400  410\n0      3/3  3/3\n1      3/3  3/3") == 4
    assert run("retrieval", *arguments)[3] == rows


def test_retrieval_asks_the_model(run):
    arguments = ["--forms", "filler", "--lengths", "400", "--depths", "0.5", "--trials", "2", "--tokens", "4"]
    code, out, err, rows, _ = run("retrieval", *arguments)
    assert (code, err) == (0, "")
    # The tiny model finds nothing, so nothing else is asked.
    assert {(row["method"], row["found"]) for row in rows} == {("full", "0")}
    assert "filler: 0 of 0\ndepth  400\n0.5      -" in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["loss", "--settings", "window=3"], "with a field of n_sink"),
        (["loss", "--settings", "decay=x"], "decay must be a number"),
        (["loss", "--budgets", "20", "--settings", "grace=16"], "n_sink + grace must be below budget"),
        (["loss", "--methods", "best"], "no method 'best'"),
        (["loss", "--methods", "nowhere:f"], "can't be imported"),
        (["loss", "--text", "/no/such/file"], "/no/such/file"),
        (["generation", "--prompts", "/no/such/file"], "/no/such/file"),
        (["generation", "--settings", "grace"], "FIELD=VALUE"),
        (["retrieval", "--settings", "grace=-1"], "grace must be between 0"),
        (["retrieval", "--text", "/no/such/file"], "/no/such/file"),
    ],
    ids=str,
)
def test_bad_input_is_refused_before_the_model_is_looked_for(run, arguments, part):
    code, out, err, rows, _ = run(*arguments, model="/no/such/model")
    assert (code, out, rows) == (2, "", [])
    assert len(err.splitlines()) == 1
    assert part in err


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["loss", "--windows", "99", "--context", "30"], "99 windows of 157 need 15543: ask for fewer"),
        (["loss", "--budgets", "4"], "--budgets"),
        (["loss", "--windows", "0"], "--windows"),
        (["retrieval", "--depths", "2"], "--depths"),
        (["retrieval", "--forms", "filler", "--lengths", "50"], "a prompt of 50 tokens has no room"),
        (["retrieval", "--forms", "poetry"], "poetry"),
        (["everything"], "everything"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(run, arguments, part, texts):
    text = ["--text", texts[0]] if arguments[0] == "loss" else []
    code, out, err, _, _ = run(*arguments, *text)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert part in err


def test_rows_of_another_kind_are_refused(run, texts, tmp_path):
    assert run("loss", "--text", texts[0], *LOSS, *SMALL)[0] == 0
    code, _, err, _, _ = run("generation", "--n-prompts", "1")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "other columns" in err


def test_help_loads_nothing_heavy():
    code = (
        "import sys\nfrom h2o_mlxlm.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "heavy = {'mlx_lm', 'transformers', 'tqdm', 'h2o_mlxlm.evaluation'}\n"
        "print(sorted(heavy & sys.modules.keys()), file=sys.stderr)"
    )
    for arguments in (
        ["--help"],
        ["eval", "--help"],
        ["eval", "loss", "--help"],
        ["compare", "--help"],
        ["calibrate", "--help"],
    ):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        assert done.stderr == "[]\n"
        assert "usage" in done.stdout
