"""``h2o-mlxlm compare``: one prompt through several caches."""

import io
import json
import sys

import mlx_lm
import pytest

import h2o_mlxlm
from h2o_mlxlm.cli import compare, main

PROMPT = "hello world " * 10
SMALL = ["--budget", "24", "--max-tokens", "20", "--settings", "n_sink=2 grace=4"]


@pytest.fixture
def run(tiny_folder, capsys):
    def run(*arguments, model=str(tiny_folder)):
        try:
            code = main(["compare", "--model", model, *arguments])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


def test_json_has_each_methods_text_and_figures(run, tiny_folder):
    code, out, err = run("--prompt", PROMPT, *SMALL, "--json", "--ignore-chat-template")
    assert (code, err, out.count("\n")) == (0, "", 1)
    got = json.loads(out)
    full, recency, h2o = got["results"]
    assert [r["method"] for r in got["results"]] == ["full", "recency", "h2o"]
    assert h2o["name"] == "h2o grace=4 n_sink=2"
    assert (recency["tokens_kept"], h2o["tokens_kept"], h2o["budget"], full["budget"]) == (24, 24, 24, None)
    assert full["tokens_kept"] == got["prompt_tokens"] + 19
    assert full["differs_at"] is None
    assert h2o["cache_bytes"] < full["cache_bytes"]
    assert all(r["tokens_per_second"] > 0 for r in got["results"])
    for result in (recency, h2o):
        at = result["differs_at"]
        assert result["tokens"][:at] == full["tokens"][:at]
        assert result["tokens"][at] != full["tokens"][at]
    model, tokenizer = h2o_mlxlm.load(str(tiny_folder))
    assert full["text"] == mlx_lm.generate(model, tokenizer, PROMPT, max_tokens=20)


def test_with_room_for_all_nothing_differs(run):
    arguments = ["--prompt", PROMPT, "--budget", "400", "--max-tokens", "20", "--methods", "h2o", "full", "--json"]
    h2o, full = json.loads(run(*arguments)[1])["results"]
    assert h2o["differs_at"] is None
    assert h2o["text"] == full["text"]


def test_without_the_full_cache_nothing_is_compared(run):
    code, out, _ = run("--prompt", PROMPT, *SMALL, "--methods", "recency", "h2o")
    assert code == 0
    assert "differs" not in out
    assert [line.split(",")[0] for line in out.splitlines() if line.startswith("== ")] == [
        "== recency",
        "== h2o grace=4 n_sink=2",
    ]


def test_several_settings_are_several_texts(run):
    code, out, _ = run("--prompt", PROMPT, *SMALL, "--settings", "decay=1 grace=4", "grace=2", "--methods", "h2o")
    assert code == 0
    assert out.count("== h2o") == 3


def test_the_prompt_may_come_from_a_pipe(run, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe"))
    code, out, _ = run("--prompt", "-", *SMALL, "--methods", "full")
    assert code == 0
    assert "== full, kept" in out


def test_sampling_is_seeded(run):
    def texts(seed):
        arguments = ["--prompt", PROMPT, *SMALL, "--temp", "1", "--seed", seed, "--json"]
        return [r["text"] for r in json.loads(run(*arguments)[1])["results"]]

    assert texts("1") == texts("1") != texts("2")


def test_the_text_ends_where_the_model_ends_it(run, monkeypatch, tiny_folder):
    whole = json.loads(run("--prompt", PROMPT, *SMALL, "--methods", "full", "--json")[1])["results"][0]["tokens"]
    real = h2o_mlxlm.models.load

    def ending(name):
        model, tokenizer = real(name)
        tokenizer.add_eos_token(str(whole[7]))
        return model, tokenizer

    monkeypatch.setattr(h2o_mlxlm.models, "load", ending)
    (result,) = json.loads(run("--prompt", PROMPT, *SMALL, "--methods", "full", "--json")[1])["results"]
    end = whole.index(whole[7])
    assert result["tokens"] == whole[: end + 1]
    assert result["text"] == real(str(tiny_folder))[1].decode(whole[:end])


@pytest.mark.parametrize(
    ("full", "tokens", "at"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([], [], None),
    ],
)
def test_the_first_difference(full, tokens, at):
    assert compare.first_difference(full, tokens) == at


def result(**changes):
    base = {"name": "h2o", "tokens_kept": 64, "cache_bytes": 2.5e6, "tokens_per_second": 8.04, "differs_at": 3}
    return base | changes


def test_the_header_says_what_the_text_took():
    assert compare.header(result()) == "h2o, kept 64, 2.50 MB, 8.0 tokens/s, differs at 3"
    assert compare.header(result(differs_at=None)).endswith("differs at none")
    assert compare.header(result(tokens_per_second=None), False) == "h2o, kept 64, 2.50 MB, - tokens/s"


def test_columns_stand_side_by_side_where_they_fit():
    parts = [("head a", "aaaa " * 20 + "\n\nend"), ("head b", "bbbb " * 5)]
    lines = compare.layout(parts, 82).splitlines()
    assert lines[0] == "head a".ljust(42) + "head b"
    assert lines[1] == "-" * 40 + "  " + "-" * 40
    assert lines[2] == ("aaaa " * 8).rstrip().ljust(42) + ("bbbb " * 5).rstrip()
    assert [line.rstrip() for line in lines[3:]] == [("aaaa " * 8).rstrip(), ("aaaa " * 4).rstrip(), "", "end"]


@pytest.mark.parametrize(("n_parts", "width"), [(2, 81), (2, 0), (3, 123), (1, 200), (4, 400)])
def test_else_one_stands_below_the_other(n_parts, width):
    text = compare.layout([(f"head {i}", "words") for i in range(n_parts)], width)
    assert text == "\n\n".join(f"== head {i}\nwords" for i in range(n_parts))


def test_on_a_wide_terminal_the_command_prints_columns(run, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run("--prompt", PROMPT, *SMALL)
    assert code == 0
    assert "==" not in out
    assert out.splitlines()[0].count("kept") == 3


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--prompt", " "], "the prompt is empty"),
        ([], "--prompt"),
        (["--prompt", "x", "--settings", "window=3"], "with a field of n_sink"),
        (["--prompt", "x", "--methods", "best"], "no method 'best'"),
        (["--prompt", "x", "--budget", "20", "--settings", "grace=16"], "n_sink + grace must be below budget"),
        (["--prompt", "x", "--budget", "3"], "--budget"),
        (["--prompt", "x"], "no model folder"),
    ],
    ids=str,
)
def test_bad_input_is_one_line(run, arguments, part):
    code, out, err = run(*arguments, model="/no/such/model")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert part in err
