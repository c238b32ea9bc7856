"""The command line: mlx_lm's flags, ours, and one line with exit code 2 for what it can't do."""

import io
import json
import subprocess
import sys
from dataclasses import asdict
from importlib import metadata

import huggingface_hub.constants
import mlx.core as mx
import mlx_lm
import pytest

import h2o_mlxlm
from h2o_core import H2OConfig
from h2o_core.scorer import scorer_from
from h2o_mlxlm.cli import flags, loading, main

SMALL = ["--budget", "24", "--n-sink", "2", "--grace", "4", "--max-tokens", "40"]
LONG = "hello world " * 20
COUNTS = ["prompt_tokens", "generated_tokens", "accepted_tokens", "kept_tokens", "evictions"]
COUNTS += ["cache_bytes", "full_cache_bytes"]


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture
def run(tiny_folder, capsys):
    """Run ``generate`` on the tiny model: exit code, standard output, standard error."""

    def run(*arguments, model=True):
        named = ["--model", str(tiny_folder)] if model else []
        try:
            code = main(["generate", *named, *arguments])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr()

    return run


@pytest.fixture
def report(run):
    """Run ``generate --json`` and read what it prints."""

    def report(*arguments):
        code, out, err = run("--json", *arguments)
        assert (code, err, out.count("\n")) == (0, "", 1)
        return json.loads(out)

    return report


def assert_refused(result, *parts):
    """One line on standard error that names each part, exit code 2, nothing printed."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.endswith("\n")
    assert err.startswith("h2o-mlxlm")
    assert "Traceback" not in err
    assert all(part in err for part in parts), err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--prompt", ""], ["the prompt is empty"]),
        (["--prompt", " \\n "], ["the prompt is empty"]),
        (["--prompt", "a\udcffb"], ["the prompt is not"]),
        (["--budget", "20", "--grace", "16"], ["n_sink + grace must be below budget", "budget=20"]),
        (["--budget", "0"], ["budget must be between 1 and"]),
        (["--budget", "none"], ["--budget", "tokens such as 512 or memory such as 2GB", "'none'"]),
        (["--budget", "1.5"], ["--budget", "'1.5'"]),
        (["--budget", "-5"], ["--budget"]),
        (["--budget", "1KB"], ["--budget: 1000 bytes hold no token"]),
        (["--budget", "4KB", "--grace", "16"], ["n_sink + grace must be below budget"]),
        (["--decay", "0"], ["decay must be in (0, 1]"]),
        (["--decay", "nan"], ["decay must be in (0, 1]"]),
        (["--n-sink", "-1"], ["n_sink must be between 0"]),
        (["--budget-shape", "round"], ["--budget-shape", "'round'"]),
        (["--budget-shape", "adaptive", "--queries", "key"], ['heads="adaptive" works with queries=', "got 'key'"]),
        (["--budget-shape", "pyramid", "--budget", "6", "--grace", "1"], ["ratio must be between 1 and 1", "got 3"]),
        (["--rewind", "-1"], ["rewind must be between 0 and 64 tokens, got -1"]),
        (["--rewind", "2.5"], ["--rewind", "'2.5'"]),
        (["--rewind", "2", "--queries", "key"], ['rewind needs queries="true", got rewind=2']),
        (["--num-draft-tokens", "4"], ["--num-draft-tokens needs --draft-model"]),
        (["--draft-model", "x", "--num-draft-tokens", "65"], ["--num-draft-tokens", "must be between 1 and 64"]),
        (["--draft-model", "x", "--rewind", "2"], ["--rewind must be at least --num-draft-tokens", "got 2 and 3"]),
        (["--draft-model", "x", "--rewind", "0"], ["--rewind must be at least --num-draft-tokens", "got 0 and 3"]),
        (["--draft-model", "x", "--queries", "key"], ['rewind needs queries="true", got rewind=3']),
        (["--draft-model", "/no/such/folder"], ["no model folder at /no/such/folder"]),
        (["--queries", "both"], ["--queries", "'both'"]),
        (["--scorer", "best"], ["--scorer: scorer must be one of 'cam'", "got 'best'"]),
        (["--scorer", "snapkv window=0"], ["--scorer: window of scorer 'snapkv' must be between 1", "got 0"]),
        (["--scorer", "snapkv widow=3"], ["--scorer: 'widow' is no parameter of scorer 'snapkv'", "window"]),
        (["--scorer", "tova", "--decay", "0.9"], ["decay is for scorers that sum mass, and 'tova' does not"]),
        (["--scorer", "cam", "--rewind", "2"], ["scorer 'cam' merges values", "got rewind=2"]),
        (["--scorer", "tova", "--budget-shape", "adaptive"], ["heads=\"adaptive\" works with scorer='h2o' alone"]),
        (["--positions", "mixed"], ["--positions", "'mixed'"]),
        (["--temp", "-1"], ["--temp", "must be at least 0, got -1"]),
        (["--temp", "nan"], ["--temp", "got nan"]),
        (["--temp", "warm"], ["--temp", "must be a number, got 'warm'"]),
        (["--top-p", "1.5"], ["--top-p", "must be between 0 and 1, got 1.5"]),
        (["--min-p", "-0.1"], ["--min-p", "must be between 0 and 1"]),
        (["--top-k", "1000000", "--temp", "1"], ["top_k"]),
        (["--max-tokens", "0"], ["--max-tokens", "got 0"]),
        (["--max-tokens", "2.5"], ["--max-tokens", "'2.5'"]),
        (["--seed", "-1"], ["--seed", "got -1"]),
        (["--prefill-step-size", "0"], ["--prefill-step-size", "got 0"]),
        (["--chat-template-config", "{"], ["--chat-template-config", "must be a JSON object, got '{'"]),
        (["--chat-template-config", "[1]"], ["must be a JSON object, got '[1]'"]),
        (["--chat-template-config", '{"tokenize": true}'], ["chat template refuses"]),
        (["--system-prompt", "refuse"], ["the model's chat template refuses these messages: no system"]),
        (["--system-prompt", "x", "--ignore-chat-template"], ["need a chat template"]),
        (["--prefill-response", "x", "--ignore-chat-template"], ["need a chat template"]),
        (["--adapter-path", "/no/adapter"], ["/no/adapter"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["surplus"], ["surplus"]),
        (["--budget"], ["--budget", "expected one argument"]),
    ],
    ids=lambda value: " ".join(value)[:50],
)
def test_bad_input_is_one_line_and_exit_code_2(run, arguments, parts):
    assert_refused(run(*arguments), *parts)


@pytest.mark.parametrize(
    ("model", "part"),
    [
        ("/no/such/folder", "no model folder at /no/such/folder"),
        ("/no/such/file.gguf", "no GGUF file at /no/such/file.gguf"),
        ("not a repo!!", "not a repo!!"),
        ("a/b/c/d", "a/b/c/d"),
        ("no-such-org/no-such-model", "no-such-org/no-such-model"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(run, model, part):
    assert_refused(run("--model", model, model=False), part)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "{"),
        ("config.json", "{}"),
        ("config.json", '{"model_type": "llama"}'),
        ("config.json", '{"model_type": "none"}'),
        ("model.safetensors", "none"),
        ("model.safetensors", None),
        ("tokenizer.json", "{"),
    ],
)
def test_a_damaged_model_is_one_line(run, tiny_folder, tmp_path, name, content):
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).unlink()
    if content is not None:
        (tmp_path / name).write_text(content)
    assert_refused(run("--model", str(tmp_path), model=False))


def test_without_a_model_installed_the_line_says_what_to_install(run, monkeypatch):
    monkeypatch.setattr(metadata, "files", lambda name: [])
    assert_refused(run(model=False), "pip install")


def test_no_command_is_one_line(capsys):
    with pytest.raises(SystemExit) as exit_:
        main([])
    assert_refused((exit_.value.code, *capsys.readouterr()), "COMMAND")


@pytest.mark.parametrize(
    ("text", "value"),
    [("512", 512), ("2GB", 2e9), ("1.5 MB", 1.5e6), ("3kb", 3e3), ("100B", 100.0), ("1TB", 1e12), (" 64 ", 64)],
)
def test_a_budget_is_tokens_or_memory(text, value):
    read = flags.budget(text)
    assert (read, type(read)) == (value, type(value))


def filled(model, budget, rewind=0, scorer="h2o", **how):
    """Bytes of full caches of that budget."""
    config = H2OConfig(budget=budget, n_sink=0, grace=0, rewind=rewind, scorer=scorer)
    caches = h2o_mlxlm.make_prompt_cache(model, config, **how)
    mx.eval(model(mx.zeros((1, budget + 3), mx.int32), cache=caches))
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=caches))
    return sum(c.nbytes for c in caches)


@pytest.mark.parametrize("n_bytes", [10_000.0, 33_333.0, 34_120.0])
@pytest.mark.parametrize(
    "manner", [{}, {"heads": "adaptive"}, {"rewind": 3}, {"scorer": scorer_from("snapkv window=40")}], ids=str
)
def test_a_memory_budget_is_the_largest_that_fits(make_model, n_bytes, manner):
    model = make_model()
    how = {"heads": manner.get("heads", "equal")}
    config = {name: value for name, value in manner.items() if name != "heads"}
    tokens = loading.tokens_in([model], n_bytes, how, **config)
    assert filled(model, tokens, **manner) <= n_bytes < filled(model, tokens + 1, **manner)


def test_a_memory_budget_is_for_the_draft_models_caches_too(make_model):
    models = make_model(), make_model(num_hidden_layers=1)
    tokens = loading.tokens_in(models, 33_333.0, {}, rewind=2)
    needed = [sum(filled(m, n, rewind=2) for m in models) for n in (tokens, tokens + 1)]
    assert needed[0] <= 33_333.0 < needed[1]


def test_a_memory_budget_holds_more_rows_if_they_are_quantised(make_model):
    model, how = make_model(head_dim=32), {"kv_bits": 4, "kv_group_size": 32}
    tokens = loading.tokens_in([model], 33_333.0, how)
    assert filled(model, tokens, **how) <= 33_333.0 < filled(model, tokens + 1, **how)
    assert tokens > 3 * loading.tokens_in([model], 33_333.0, {})


@pytest.mark.parametrize("n_bytes", [1e15, float("inf")])
def test_more_memory_than_any_cache_needs_is_no_error(make_model, n_bytes):
    assert H2OConfig(budget=loading.tokens_in([make_model()], n_bytes, {})).budget > 2**29


def test_json_is_one_object_with_the_issues_keys(report):
    got = report("--prompt", LONG, *SMALL)
    assert list(got) == ["text", *COUNTS, "backend", "kv_bits", "kv_quantizer", "config"]
    assert got["kept_tokens"] <= 24
    seen = got["kept_tokens"] + got["evictions"]
    # The last token that is shown may have been fed to the model, or not.
    assert seen - got["prompt_tokens"] - got["generated_tokens"] in (-1, 0)
    assert got["evictions"] > 0
    # Two layers, keys and values, two heads of 16 float32.
    assert 0 < got["cache_bytes"] < got["full_cache_bytes"] == seen * 2 * 2 * 2 * 16 * 4
    assert H2OConfig(**got["config"]) == H2OConfig(budget=24, n_sink=2, grace=4)


@pytest.mark.parametrize("scorer", ["snapkv window=8", "kvzip", "qfilters", "expected_attention"])
def test_any_scorer_by_its_name_and_what_it_needs_from_the_prompt(report, scorer):
    got = report("--prompt", LONG, *SMALL, "--scorer", scorer)
    assert got["evictions"] > 0
    assert got["config"]["scorer"] == asdict(scorer_from(scorer))


def test_a_draft_models_scorer_gets_inputs_of_its_own(report, tiny_folder):
    got = report("--prompt", LONG, *SMALL, "--scorer", "kvzip", "--draft-model", str(tiny_folder))
    assert got["accepted_tokens"] > 0
    assert got["config"]["scorer"]["name"] == "kvzip"


def test_a_memory_budget_bounds_the_cache(report):
    got = report("--prompt", LONG, "--budget", "20KB", "--max-tokens", "10")
    assert 15_000 < got["cache_bytes"] <= 20_000
    assert got["kept_tokens"] == got["config"]["budget"]
    assert got["evictions"] > 0


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        (["--queries", "key"], "queries", "key"),
        (["--positions", "rolling"], "positions", "rolling"),
        (["--no-evict-during-prefill"], "evict_during_prefill", False),
        (["--decay", "0.5"], "decay", 0.5),
        (["--rewind", "2"], "rewind", 2),
    ],
)
def test_the_caches_flags_reach_the_cache(report, arguments, name, value):
    got = report("--prompt", LONG, *SMALL, *arguments)
    assert got["config"][name] == value
    assert got["kept_tokens"] == 24


@pytest.mark.parametrize("shape", ["equal", "pyramid", "adaptive"])
def test_a_budget_has_a_shape_and_a_total(report, monkeypatch, shape):
    made, real = [], mlx_lm.stream_generate

    def spy(*arguments, prompt_cache, **settings):
        made.extend(prompt_cache)
        return real(*arguments, prompt_cache=prompt_cache, **settings)

    monkeypatch.setattr(mlx_lm, "stream_generate", spy)
    got = report("--prompt", LONG, *SMALL, "--budget-shape", shape)
    seen = made[0].tokens_seen
    # The mean over layers and heads.
    assert (got["kept_tokens"], got["evictions"]) == (24, seen - 24)
    held = [[int((head >= 0).sum().item()) for head in cache.kept_positions[0]] for cache in made]
    assert sum(map(sum, held)) == 2 * 2 * 24
    assert held[0] == ([24, 24] if shape == "equal" else [33, 33] if shape == "pyramid" else held[0])
    assert (len(set(map(tuple, held))) > 1) == (shape != "equal")
    assert isinstance(made[0], h2o_mlxlm.AdaptiveH2OKVCache) == (shape == "adaptive")


@pytest.fixture
def draft_folder(tiny_folder, tmp_path):
    """The tiny model with one layer fewer."""
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    weights = mx.load(str(tmp_path / "model.safetensors"))
    kept = {name: w for name, w in weights.items() if ".layers.1." not in name}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), kept, {"format": "mlx"})
    return tmp_path


def test_a_draft_model_changes_no_text(report, draft_folder):
    alone = report("--prompt", LONG, *SMALL, "--rewind", "4")
    got = report("--prompt", LONG, *SMALL, "--draft-model", str(draft_folder), "--num-draft-tokens", "4")
    assert got["text"] == alone["text"]
    assert got["config"] == alone["config"]
    assert got["config"]["rewind"] == 4
    assert (alone["accepted_tokens"], got["kept_tokens"]) == (0, 24)
    assert 0 < got["accepted_tokens"] < got["generated_tokens"]
    # Of both models' caches.
    assert got["cache_bytes"] > 1.4 * alone["cache_bytes"]


def test_a_draft_model_of_another_tokenizer_is_refused(run, draft_folder):
    tokenizer = json.loads((draft_folder / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["zz"] = len(tokenizer["model"]["vocab"])
    (draft_folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert_refused(run(*SMALL, "--draft-model", str(draft_folder)), "must have the model's tokenizer", "268 tokens")


def test_a_long_prompt_for_two_models_shows_no_bar_that_stands_still(run, draft_folder):
    arguments = ["--prompt", LONG, "--prefill-step-size", "16", *SMALL, "--draft-model", str(draft_folder)]
    assert run(*arguments)[::2] == (0, "")


def test_with_a_budget_above_all_tokens_the_text_is_mlx_lms(report, tiny_folder):
    model, tokenizer = h2o_mlxlm.load(str(tiny_folder))
    want = mlx_lm.generate(model, tokenizer, tokenizer.encode(LONG), max_tokens=60)
    assert report("--prompt", LONG, "--ignore-chat-template", "--max-tokens", "60")["text"] == want


def test_a_dash_reads_standard_input(run, prompts, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n"))
    assert run("--prompt", "-", *SMALL)[0] == 0
    assert prompts == ["[user]from a pipe\n<|end|>[assistant]"]


@pytest.mark.parametrize("text", ["", " \n"])
def test_empty_standard_input_is_an_empty_prompt(run, monkeypatch, text):
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    assert_refused(run("--prompt", "-"), "the prompt is empty")


@pytest.mark.parametrize(
    ("arguments", "prompt"),
    [
        ([], "[user]hi<|end|>[assistant]"),
        (["--system-prompt", "Be brief."], "[system]Be brief.<|end|>[user]hi<|end|>[assistant]"),
        (["--prefill-response", "Well"], "[user]hi<|end|>[assistant]Well"),
        (["--ignore-chat-template"], "<|bos|>hi"),
        (["--prompt", r"a\nb\tc"], "[user]a\nb\tc<|end|>[assistant]"),
        (["--chat-template-config", '{"add_generation_prompt_": 1}'], "[user]hi<|end|>[assistant]"),
    ],
)
def test_the_prompt_is_what_mlx_lm_would_make(run, prompts, arguments, prompt):
    assert run("--prompt", "hi", *SMALL, *arguments)[0] == 0
    assert prompts == [prompt]


def test_a_seed_makes_sampling_repeat(report):
    texts = [report("--temp", "1", "--top-k", "50", "--seed", s, *SMALL)["text"] for s in ("1", "1", "2")]
    assert texts[0] == texts[1] != texts[2]


def test_more_tokens_can_end_the_text(report):
    whole = report("--max-tokens", "30")
    assert whole["generated_tokens"] == 30
    every = [str(i) for i in range(3, 200)]
    assert report("--max-tokens", "30", "--extra-eos-token", *every)["generated_tokens"] < 30


def test_not_verbose_prints_the_text_alone(run, report):
    text = report(*SMALL)["text"]
    assert run("--verbose", "False", *SMALL) == (0, text + "\n", "")


def test_verbose_ends_with_a_line_of_figures(run, report):
    got = report("--prompt", LONG, *SMALL)
    code, out, _ = run("--prompt", LONG, *SMALL)
    assert code == 0
    text, _, last = out.removesuffix("\n").rpartition("\n")
    assert text == got["text"]
    for part in (
        f"prompt {got['prompt_tokens']} tokens",
        "generated 40 at",
        "per second",
        "0 of them drafted",
        "kept 24 per head",
        f"evicted {got['evictions']}",
        f"cache {got['cache_bytes'] / 1e6:.2f} MB, full cache {got['full_cache_bytes'] / 1e6:.2f} MB",
    ):
        assert part in last


def test_a_long_prefill_shows_a_bar_and_a_short_one_none(run):
    assert "prompt" in run("--prompt", LONG, "--prefill-step-size", "16", *SMALL)[2]
    assert run("--prompt", LONG, *SMALL)[2] == ""
    assert run("--prompt", LONG, "--prefill-step-size", "16", "--verbose", "F", *SMALL)[2] == ""


def test_an_interruption_ends_quietly(run, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(mlx_lm, "stream_generate", interrupted)
    assert run(*SMALL) == (130, "", "")


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"]])
def test_help_as_a_module(arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "h2o_mlxlm", *arguments], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "generate" in done.stdout


def test_as_a_process_the_text_comes_out_and_the_log_apart(tiny_folder):
    command = [sys.executable, "-m", "h2o_mlxlm", "generate", "--model", str(tiny_folder), *SMALL]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "kept 24 per head" in done.stdout.splitlines()[-1]
    assert done.stderr.count("\n") == 1
    assert "CPU back end: weights as float32" in done.stderr


def test_a_back_end_by_name_runs_or_is_refused(run, report, monkeypatch):
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert report("--prompt", "hello", *SMALL, "--backend", "reference")["backend"] == "reference"
    code, out, err = run("--prompt", "hello", *SMALL, "--backend", "metal")
    assert (code, out) == (2, "")
    assert 'backend="metal" can\'t run here' in err


def test_rows_can_be_stored_in_fewer_bits(run, report, make_folder):
    folder = str(make_folder(head_dim=32))
    flags = ("--prompt", LONG, *SMALL, "--model", folder)
    plain = report(*flags)
    few = report(*flags, "--kv-bits", "4", "--kv-group-size", "32")
    assert (plain["kv_bits"], few["kv_bits"]) == (None, 4)
    assert few["evictions"] > 0
    assert few["cache_bytes"] < plain["cache_bytes"] / 3
    assert few["full_cache_bytes"] / plain["full_cache_bytes"] == pytest.approx(1, rel=0.5)
    blocks = ("--kv-bits", "4", "--kv-group-size", "32", "--kv-quantizer", "kivi")
    assert report(*flags, *blocks)["kv_quantizer"] == "kivi"
    assert_refused(run(*flags, *blocks, "--budget", "1MB"), "--budget in bytes needs rows of one size", "in tokens")
    assert_refused(run("--kv-bits", "5"), "kv_bits must be None or 8 or 4, or a pair", "got 5")
    assert_refused(run("--kv-group-size", "32"), "do nothing without kv_bits")
    assert_refused(run("--kv-bits", "8", "--kv-group-size", "32"), "keys have a head size of 16", "leave kv_bits out")
