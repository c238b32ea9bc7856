"""``h2o-mlxlm chat``: turn after turn on one bounded cache, until q or the end of the input."""

import io
import os
import pty
import re
import select
import subprocess
import sys

import mlx.core as mx
import mlx_lm
import pytest

import h2o_mlxlm.integration
from h2o_core import H2OConfig
from h2o_mlxlm import H2OKVCache, load, make_prompt_cache
from h2o_mlxlm.cli import main

SMALL = ["--budget", "24", "--n-sink", "2", "--grace", "4", "--max-tokens", "10"]
PROMPT = "\u203a "
CONFIG = H2OConfig(budget=24, n_sink=2, grace=4)


def plain(text):
    """Without colours and movements of the cursor."""
    return re.sub(r"\x1b\[[0-9;]*[A-Za-z]|[\x01\x02\r]", "", text)


@pytest.fixture
def chat(tiny_folder, capsys, monkeypatch):
    """Chat with the tiny model, a line a turn: exit code, what is shown, standard error."""

    def chat(lines, *arguments, model=None):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        try:
            code = main(["chat", "--model", str(model or tiny_folder), *SMALL, *arguments])
        except SystemExit as exit_:
            code = exit_.code
        out, err = capsys.readouterr()
        return code, plain(out), err

    return chat


@pytest.fixture
def turns(monkeypatch):
    """Each call that reaches mlx_lm: its prompt, decoded, and its caches."""
    seen, real = [], mlx_lm.stream_generate

    def spy(model, tokenizer, prompt, **settings):
        seen.append((tokenizer.decode(prompt), settings["prompt_cache"]))
        return real(model, tokenizer, prompt, **settings)

    monkeypatch.setattr(mlx_lm, "stream_generate", spy)
    return seen


def kept_lines(out):
    return [tuple(map(int, x)) for x in re.findall(r"kept (\d+) of (\d+) tokens · evicted (\d+) · cache", out)]


def test_turns_go_on_one_bounded_cache(chat, turns, tiny_folder):
    code, out, _ = chat(["hello", "and then", "again and again", "q", "never asked"])
    assert code == 0
    assert [text for text, _ in turns] == [
        f"[user]{q}<|end|>[assistant]" for q in ("hello", "and then", "again and again")
    ]
    assert len({id(caches) for _, caches in turns}) == 1
    caches = turns[0][1]
    assert {type(c) for c in caches} == {H2OKVCache}
    assert {c.tokens_kept for c in caches} == {24}
    kept = kept_lines(out)
    assert [k for k, *_ in kept] == [24, 24, 24]
    assert [s - k for k, s, _ in kept] == [e for *_, e in kept]
    assert kept[-1] == (24, caches[0].tokens_seen, caches[0].evictions)
    assert kept[-1][1] > 3 * 24
    # The same by hand, on a cache of its own.
    model, tokenizer = load(str(tiny_folder))
    fresh = make_prompt_cache(model, CONFIG)
    for question, _ in turns:
        prompt = tokenizer.encode(question, add_special_tokens=False)
        text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=10, prompt_cache=fresh)
        assert plain(text) in out
    assert mx.array_equal(fresh[-1].kept_positions, caches[-1].kept_positions)


def test_r_begins_anew_and_h_helps(chat, turns):
    code, out, _ = chat(["hello", "h", "r", "hello"])  # no q: the end of the input ends the chat
    assert code == 0
    (_, first), (_, second) = turns
    assert first is not second
    assert second[0].tokens_seen == first[0].tokens_seen
    assert out.count("reset") == 3  # the help twice, and what r says
    assert out.count("context cleared") == 1
    assert out.count("exit") == 2
    assert out.rstrip().endswith("bye")
    assert len(kept_lines(out)) == 2


def test_the_screen_says_what_is_kept(chat, tiny_folder):
    _, out, _ = chat(["q"], "--system-prompt", "Be brief.")
    for part in ("h2o-mlxlm chat", str(tiny_folder)[:20], "24 tokens a head: the first 2, the newest 4", "Be brief."):
        assert part in out


def test_flags_reach_the_answers(chat, turns):
    outs = [chat(["hello"], "--temp", "1", "--seed", seed)[1] for seed in ("1", "1", "2")]
    answers = [out.split(PROMPT)[1].split("tokens ·")[0] for out in outs]
    assert answers[0] == answers[1] != answers[2]
    chat(["hello"], "--system-prompt", "Be brief.", "--positions", "rolling", "--budget", "40KB")
    text, caches = turns[-1]
    assert text == "[system]Be brief.<|end|>[user]hello<|end|>[assistant]"
    assert caches[0].config.positions == "rolling"
    assert caches[0].config.budget not in (24, 512)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--budget", "4"], "n_sink + grace must be below budget"),
        (["--max-kv-size", "4"], "--max-kv-size can't be used with an H2O cache"),
        (["--scorer", "kvzip"], "--scorer kvzip needs reconstruction, which generate alone makes"),
        (["--pipeline"], "--pipeline can't be used with an H2O cache"),
        (["--system-prompt", "refuse"], "the model's chat template refuses these messages: no system"),
        (["--model", "/no/such/folder"], "no model folder at /no/such/folder"),
        (["--temp", "-1"], "must be at least 0"),
    ],
)
def test_bad_input_is_one_line(chat, arguments, part):
    code, _, err = chat(["hello"], *arguments)
    assert code == 2
    assert part in err.splitlines()[-1]


def test_an_interruption_ends_quietly(chat, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(h2o_mlxlm.integration, "make_prompt_cache", interrupted)
    assert chat(["hello"])[0] == 130


def test_on_a_terminal(tiny_folder):
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "h2o_mlxlm", "chat", "--model", str(tiny_folder), *SMALL]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    shown = b""

    def read_until(part):
        nonlocal shown
        while part not in plain(shown.decode(errors="replace")):
            assert select.select([ours], [], [], 60)[0], shown
            shown += os.read(ours, 65536)

    try:
        for line, answer in (("hello", "evicted"), ("h", "exit"), ("q", "bye")):
            read_until(PROMPT)
            shown = b""
            os.write(ours, f"{line}\n".encode())
            read_until(answer)
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)
