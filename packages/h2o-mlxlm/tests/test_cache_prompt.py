"""``h2o-mlxlm cache-prompt`` and ``generate --prompt-cache-file``."""

import json
import re
import shlex
from pathlib import Path

import mlx.core as mx
import mlx_lm
import pytest
from mlx_lm.cache_prompt import setup_arg_parser

import h2o_mlxlm
from h2o_mlxlm import (
    H2OConfig,
    H2OKVCache,
    Needs,
    load_prompt_cache,
    make_prompt_cache,
    save_needs,
    save_prompt_cache,
)
from h2o_mlxlm.cli import cache_prompt, flags, main
from h2o_mlxlm.identity import needs_identity

CACHE = ["--budget", "24", "--n-sink", "2", "--grace", "4", "--decay", "0.98"]
LONG = "hello world " * 20


@pytest.fixture
def run(tiny_folder, capsys):
    """Run a command on the tiny model: exit code, standard output, standard error."""

    def run(command, *arguments, model=None):
        try:
            code = main([command, "--model", str(model or tiny_folder), *arguments])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def file(tmp_path):
    return str(tmp_path / "cache.safetensors")


@pytest.fixture
def going_on(run, file):
    """Run ``generate --json`` on a saved cache and read what it prints."""

    def going_on(*arguments):
        code, out, err = run("generate", "--json", "--max-tokens", "20", "--prompt-cache-file", file, *arguments)
        assert (code, err) == (0, "")
        return json.loads(out)

    return going_on


def assert_refused(result, *parts):
    code, out, err = result
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert all(part in err for part in parts), err


THEIRS = [action for action in setup_arg_parser()._actions if action.dest != "help"]


@pytest.mark.parametrize("theirs", THEIRS, ids=lambda action: action.dest)
def test_each_flag_of_mlx_lm_is_known_or_refused_by_name(theirs, run):
    (flag,) = theirs.option_strings
    if flag in flags.REFUSED:
        assert_refused(run("cache-prompt", flag, "4"), f"{flag} can't be used with an H2O cache", flags.REFUSED[flag])
        return
    commands = flags.Parser()
    cache_prompt.add_to(commands.add_subparsers(parser_class=flags.Parser))
    (parser,) = commands._subparsers._group_actions[0].choices.values()
    ours = parser._option_string_actions[flag]
    assert (ours.dest, ours.nargs, ours.required) == (theirs.dest, theirs.nargs, theirs.required)


def test_a_prompt_is_read_once_and_goes_on_with_everything(run, file, going_on, prompts, tiny_folder):
    code, out, err = run("cache-prompt", "--prompt", LONG, "--prompt-cache-file", file, *CACHE)
    assert code == 0, err
    model, tokenizer = h2o_mlxlm.load(str(tiny_folder))
    beginning = tokenizer.encode(f"[user]{LONG.rstrip()}", add_special_tokens=False)
    caches, texts = load_prompt_cache(file, model, return_metadata=True)
    assert out.startswith(f"prompt {caches[0].tokens_seen} tokens; kept 24 per head, evicted {caches[0].evictions}; ")
    assert caches[0].tokens_seen - len(beginning) in (0, 1)
    assert caches[0].evictions > 0
    assert texts == {"model": str(tiny_folder), "tokenizer_config": '{"trust_remote_code": false}'}
    got = going_on("--prompt", "and now")
    assert prompts == ["and now<|end|>[assistant]"]
    config = H2OConfig(budget=24, n_sink=2, grace=4, decay=0.98)
    assert H2OConfig(**got["config"]) == config == caches[0].config
    assert got["text"] == mlx_lm.generate(
        model, tokenizer, tokenizer.encode(prompts[0], add_special_tokens=False), max_tokens=20, prompt_cache=caches
    )
    assert got["evictions"] == caches[0].evictions
    # The file is only read.
    assert going_on("--prompt", "and now") == got


def test_the_readmes_commands(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    readme = (Path(__file__).parents[1] / "README.md").read_text()
    first, second = re.findall(r"^h2o-mlxlm (.* --prompt-cache-file .*)", readme, re.MULTILINE)
    for command in (first, second):
        code, out, err = run(*shlex.split(command))
        assert (code, err) == (0, "")
        assert "kept" in out


def test_with_room_for_all_two_parts_are_one_prompt(run, file, going_on, capsys):
    """What mlx_lm's generate does with the whole prompt."""
    assert run("cache-prompt", "--prompt", "hello", "--prompt-cache-file", file)[0] == 0
    got = going_on("--prompt", " world, hello")
    code, out, _ = run("generate", "--json", "--max-tokens", "20", "--prompt", "hello world, hello")
    assert code == 0
    assert got["text"] == json.loads(out)["text"]


def test_a_prompt_is_held_until_its_end(run, file, going_on, tiny_folder, monkeypatch):
    monkeypatch.setattr(cache_prompt, "STEP", 16)
    for n in (15, 16, 17):
        held = [*CACHE, "--no-evict-during-prefill"]
        assert run("cache-prompt", "--prompt", "x" * (n - 3), "--prompt-cache-file", file, *held)[0] == 0
        cache = load_prompt_cache(file, h2o_mlxlm.load(str(tiny_folder))[0])[0]
        assert cache.state["about"].count("true, false]") == 1  # holding, not rolling
    got = going_on("--prompt", LONG)
    assert got["config"]["evict_during_prefill"] is False
    assert got["kept_tokens"] == 24


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        ([], "hi<|end|>[assistant]"),
        (["--prefill-response", "Well"], "hi<|end|>[assistant]Well"),
        (["--ignore-chat-template"], "hi"),
        (["--prompt", r"a\nb"], "a\nb<|end|>[assistant]"),
    ],
)
def test_the_prompt_goes_on_in_the_same_message(run, file, going_on, prompts, arguments, prompt):
    assert run("cache-prompt", "--prompt", "hello", "--prompt-cache-file", file)[0] == 0
    going_on("--prompt", "hi", *arguments)
    assert prompts == [prompt]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--budget", "32"], ["--budget asks for budget=32, but", "was made with budget=24: leave --budget out"]),
        (["--budget", "20KB"], ["--budget asks for budget=", "budget=24"]),
        (["--decay", "0.9"], ["--decay asks for decay=0.9", "decay=0.98"]),
        (["--grace", "5"], ["--grace asks for grace=5", "grace=4"]),
        (["--no-evict-during-prefill"], ["asks for evict_during_prefill=False", "evict_during_prefill=True"]),
        (["--positions", "rolling"], ["--positions asks for positions=rolling", "positions=original"]),
        (["--trained-length", "99"], ["--trained-length asks for trained_length=99", "trained_length=None"]),
        (["--scorer", "l2norm"], ["--scorer asks for scorer=L2Norm", "made with scorer=H2O"]),
        (["--kv-bits", "8"], ["--kv-bits asks for kv_bits=8", "made with kv_bits=None: leave --kv-bits out"]),
        (["--kv-group-size", "32"], ["--kv-group-size asks for kv_group_size=32", "kv_group_size=64"]),
        (["--kv-quantizer", "kivi"], ["--kv-quantizer asks for kv_quantizer=kivi", "kv_quantizer=per_token"]),
        (["--system-prompt", "Be brief."], ["--system-prompt can't be used with --prompt-cache-file"]),
        (["--prompt-cache-file", "/none/at/all"], ["--prompt-cache-file: there is no file /none/at/all"]),
        (["--prompt-cache-file", __file__], [__file__, "is no prompt cache of this model"]),
        (["--prompt", "\udcff"], ["the prompt is not text"]),
    ],
    ids=lambda x: x[0] if x[0].startswith("--") else "",
)
def test_what_contradicts_the_file_is_one_line(run, file, arguments, parts):
    assert run("cache-prompt", "--prompt", LONG, "--prompt-cache-file", file, *CACHE)[0] == 0
    assert_refused(run("generate", "--json", "--prompt-cache-file", file, *arguments), *parts)


def test_a_scorers_arrays_go_on_from_the_file(run, file, going_on):
    own = [*CACHE[:-2], "--scorer", "morphkv window=8"]
    assert run("cache-prompt", "--prompt", LONG, "--prompt-cache-file", file, *own)[0] == 0
    got = going_on(*own)
    assert (got["config"]["scorer"]["name"], got["kept_tokens"]) == ("morphkv", 24)


def test_flags_that_say_the_same_are_fine(run, file, going_on):
    assert run("cache-prompt", "--prompt", LONG, "--prompt-cache-file", file, *CACHE)[0] == 0
    assert going_on(*CACHE, "--queries", "true")["config"]["budget"] == 24


def test_a_template_that_hides_the_message_is_refused(run, file, tiny_folder, tmp_path):
    assert run("cache-prompt", "--prompt", "hello", "--prompt-cache-file", file)[0] == 0
    other = tmp_path / "other"
    other.mkdir()
    for path in tiny_folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": "always the same"}))
    shown = run("generate", "--json", "--prompt-cache-file", file, "--prompt", "hi", model=other)
    assert_refused(shown, "the model's chat template does not show the message as it is")


def test_a_batch_is_refused(run, file, tiny_folder):
    model, _ = h2o_mlxlm.load(str(tiny_folder))
    merged = [H2OKVCache.merge([c]) for c in make_prompt_cache(model, H2OConfig())]
    save_prompt_cache(file, merged, model)
    assert_refused(run("generate", "--json", "--prompt-cache-file", file), "holds a batch, and one prompt goes on")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--prompt", " "], ["the prompt is empty"]),
        (["--prompt", "hi", "--prompt-cache-file", "/none/a"], ["--prompt-cache-file: there is no folder /none"]),
        (["--prompt", "hi", "--scorer", "kvzip"], ["--scorer kvzip needs reconstruction, which generate alone makes"]),
        (
            ["--prompt", "hi", "--kv-bits", "8", "--kv-quantizer", "kivi", "--model", "/none/at/all"],
            ["kv_quantizer='kivi' can't be saved", 'use kv_quantizer="per_token"'],
        ),
        (["--prompt", "hi", "--decay", "2"], ["decay must be in (0, 1]"]),
        (["--prompt", "hi", "--budget", "1KB"], ["bytes hold no token"]),
    ],
    ids=str,
)
def test_bad_input_is_one_line(run, file, tmp_path, arguments, parts):
    assert_refused(run("cache-prompt", "--prompt-cache-file", file, *arguments), *parts)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shape", ["pyramid", "calibrated-layers", "calibrated"])
def test_different_budgets_go_on_from_the_file(run, file, going_on, tiny_folder, tmp_path, shape):
    model = h2o_mlxlm.load(str(tiny_folder))[0]
    losses = (((0.3, 0.1), (0.01, 0.001)), ((0.9, 0.5), (0.02, 0.01)))
    save_needs(tmp_path / "needs.json", Needs(needs_identity(model), (8, 32), losses), {})
    named = ["--needs", str(tmp_path / "needs.json")] if shape != "pyramid" else []
    asked = ["--budget", "64", "--n-sink", "2", "--budget-shape", shape, *named]
    code, out, err = run("cache-prompt", "--prompt", LONG, "--prompt-cache-file", file, *asked)
    assert (code, err) == (0, "")
    assert "kept 64 per head" in out
    budgets = [getattr(c, "budgets", [c.config.budget] * 2) for c in load_prompt_cache(file, model)]
    assert len({budget for layer in budgets for budget in layer}) > 1
    assert sum(map(sum, budgets)) == 64 * 4
    got = going_on("--prompt", LONG)
    assert (got["kept_tokens"], got["config"]["budget"]) == (64, 64)
    for again in (["--budget-shape", "equal"], named or ["--budget-shape", shape]):
        message = f"{again[0]} can't be used with --prompt-cache-file: its caches are as they were saved"
        assert_refused(run("generate", "--prompt-cache-file", file, *again), message)
    if shape != "calibrated":
        contradicted = run("generate", "--prompt-cache-file", file, "--budget", "64")
        message = "with budget=one for each layer: leave --budget out"
        assert_refused(contradicted, "--budget asks for budget=64, but", message)


def test_budgets_that_change_are_not_for_a_file(run, file):
    refused = run("cache-prompt", "--prompt", LONG, "--prompt-cache-file", file, "--budget-shape", "adaptive")
    assert_refused(refused, "--budget-shape adaptive can't be saved: its heads change their budgets")


def test_layers_that_differ_in_more_than_budgets_are_reported_by_their_mean(file, going_on, tiny_folder):
    model = h2o_mlxlm.load(str(tiny_folder))[0]
    first, second = H2OConfig(budget=64, n_sink=40, grace=4, decay=0.5), H2OConfig(budget=10, n_sink=2, grace=2)
    caches = make_prompt_cache(model, [first, second])
    model(mx.ones((1, 100), mx.int32), cache=caches)
    save_prompt_cache(file, caches, model)
    got = going_on("--prompt", "hello")["config"]
    assert [got[name] for name in ("budget", "n_sink", "grace", "decay")] == [37, 21, 3, 0.725]
