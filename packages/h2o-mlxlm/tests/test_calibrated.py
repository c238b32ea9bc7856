"""Needs of heads on their way to the caches: from Python, and by the flags of commands."""

import json
import re

import mlx.core as mx
import mlx_lm
import pytest

from h2o_mlxlm import (
    H2OConfig,
    H2OKVCache,
    Needs,
    SplitH2OKVCache,
    calibrated_config,
    calibrated_layers,
    load,
    make_prompt_cache,
    needs,
    save_needs,
)
from h2o_mlxlm.cli import main
from h2o_mlxlm.evaluation.methods import Variant, method_of
from h2o_mlxlm.identity import needs_identity

LOSSES = (((0.3, 0.1), (0.01, 0.001)), ((0.9, 0.5), (0.02, 0.01)))
CONFIG = H2OConfig(budget=96, n_sink=2)


@pytest.fixture(scope="module")
def model(tiny_folder):
    return load(str(tiny_folder))[0]


@pytest.fixture(scope="module")
def measured(model):
    return Needs(needs_identity(model), (8, 32), LOSSES)


@pytest.fixture
def file(measured, tmp_path):
    save_needs(tmp_path / "needs.json", measured, {})
    return str(tmp_path / "needs.json")


def held(caches):
    return [[int((head >= 0).sum().item()) for head in c.kept_positions[0]] for c in caches]


def filled(model, caches):
    mx.eval(model(mx.random.randint(3, 260, (1, 400), key=mx.random.key(0)), cache=caches))
    return held(caches)


def test_heads_hold_what_their_needs_say(model, measured):
    caches = make_prompt_cache(model, CONFIG, heads=measured)
    assert filled(model, caches) == measured.budgets_for(96)
    assert len({n for layer in held(caches) for n in layer}) > 2


def test_calibrated_takes_what_the_package_carries(model, measured, monkeypatch):
    with pytest.raises(ValueError, match="no needs of this model's heads come with h2o_mlxlm: measure them"):
        make_prompt_cache(model, CONFIG, heads="calibrated")
    carried = {needs_identity(model): measured}
    monkeypatch.setattr(needs, "packaged_needs", carried.get)
    assert filled(model, make_prompt_cache(model, CONFIG, heads="calibrated")) == measured.budgets_for(96)


def test_layers_hold_what_their_needs_say(model, measured, monkeypatch):
    """As plain caches, which do whatever those of equal budgets do."""
    configs = calibrated_layers(model, CONFIG, measured)
    assert [c.budget for c in configs] == [layer[0] for layer in measured.budgets_for(96, groups=1)]
    assert len({c.budget for c in configs}) == 2
    assert [c.grace for c in configs] == [c.budget // 4 for c in configs]
    caches = make_prompt_cache(model, configs)
    assert {type(c) for c in caches} == {H2OKVCache}
    assert filled(model, caches) == measured.budgets_for(96, groups=1)
    with pytest.raises(ValueError, match="no needs of this model's heads come with h2o_mlxlm"):
        calibrated_layers(model, CONFIG)
    monkeypatch.setattr(needs, "packaged_needs", {needs_identity(model): measured}.get)
    assert calibrated_layers(model, CONFIG) == configs


def test_the_configuration_for_needs_is_the_one_that_was_measured():
    assert calibrated_config(96) == H2OConfig(budget=96, grace=48, long_share=0.35)
    assert calibrated_config(96, grace=10, long_share=0.0, decay=1.0) == H2OConfig(budget=96, grace=10, decay=1.0)
    assert calibrated_config(96, grace=None) == calibrated_config(96)
    assert calibrated_config(96, scorer="tova") == H2OConfig(budget=96, grace=48, scorer="tova")
    with pytest.raises(ValueError, match=r"n_sink [+] grace must be below budget, got n_sink=4, grace=4, budget=8"):
        calibrated_config(8)
    with pytest.raises(TypeError, match="budget must be an integer number of tokens, got '64'"):
        calibrated_config("64")


def test_what_does_not_fit_is_refused_at_construction(model, measured, make_model):
    with pytest.raises(ValueError, match=r"needs of heads were measured on model .*, and this one is"):
        make_prompt_cache(make_model(num_hidden_layers=3), CONFIG, heads=measured)
    with pytest.raises(ValueError, match="divides the budget of one H2OConfig, got a list of 2"):
        make_prompt_cache(model, [CONFIG] * 2, heads=measured)
    three = Needs(measured.model, (8, 32), tuple((*layer, (0.1, 0.1)) for layer in LOSSES))
    with pytest.raises(ValueError, match="budgets for 3 KV heads of H2O layer 0, of which llama has 2 here"):
        make_prompt_cache(model, CONFIG, heads=three)
    with pytest.raises(ValueError, match="needs must be of the 2 layers that get an H2O cache, got 4"):
        calibrated_layers(model, CONFIG, Needs(measured.model, (8, 32), LOSSES * 2))
    with pytest.raises(TypeError, match=r"needs must be Needs, as load_needs returns them, got 'needs\.json'"):
        calibrated_layers(model, CONFIG, "needs.json")
    with pytest.raises(TypeError, match=r"config must be an H2OConfig, got \[H2OConfig.*calibrated_config"):
        calibrated_layers(model, [CONFIG] * 2, measured)
    with pytest.raises(ValueError, match=r"some heads keep 24 tokens where the mean is 96.*n_sink [+] grace must"):
        make_prompt_cache(model, H2OConfig(budget=96, n_sink=20), heads=measured)


@pytest.fixture
def generated(tiny_folder, monkeypatch, capsys):
    """Run the command with flags; its caches and its report."""
    made, real = [], mlx_lm.stream_generate

    def spy(*arguments, prompt_cache, **settings):
        made.extend(prompt_cache)
        return real(*arguments, prompt_cache=prompt_cache, **settings)

    def run(*flags):
        monkeypatch.setattr(mlx_lm, "stream_generate", spy)
        common = ["--n-sink", "2", "--max-tokens", "4", "--json", "--prompt", "hello " * 300]
        assert main(["generate", "--model", str(tiny_folder), *common, *flags]) == 0
        return made, json.loads(capsys.readouterr().out)

    return run


@pytest.mark.parametrize(("shape", "kind"), [("calibrated", SplitH2OKVCache), ("calibrated-layers", H2OKVCache)])
def test_generate_goes_by_a_file(generated, file, measured, shape, kind):
    made, report = generated("--budget", "96", "--budget-shape", shape, "--needs", file)
    assert [type(c) for c in made] == [kind] * 2
    assert held(made) == measured.budgets_for(96, groups=1 if kind is H2OKVCache else 3)
    assert (report["kept_tokens"], report["backend"], report["config"]["budget"]) == (96, "reference", 96)


@pytest.mark.parametrize(
    ("flags", "grace", "long_share"),
    [
        (["--budget-shape", "calibrated"], 48, 0.35),
        (["--budget-shape", "calibrated-layers", "--grace", "9"], 9, 0.35),
        (["--budget-shape", "calibrated", "--long-share", "0.0"], 48, 0.0),
        (["--budget-shape", "pyramid"], 24, 0.0),
        ([], 24, 0.0),
    ],
)
def test_settings_go_with_the_shape_unless_they_are_given(generated, file, flags, grace, long_share):
    named = ["--needs", file] if any(flag.startswith("calibrated") for flag in flags) else []
    _, report = generated("--budget", "96", *flags, *named)
    assert (report["config"]["grace"], report["config"]["long_share"]) == (grace, long_share)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--needs", "FILE"], "--needs is for --budget-shape calibrated and calibrated-layers alone, got equal"),
        (
            ["--budget-shape", "calibrated-layers", "--needs", "FILE", "--draft-model", "/no/model"],
            "--draft-model can't be used with --budget-shape calibrated-layers: needs are of one model",
        ),
        (["--budget-shape", "calibrated", "--needs", "/no/file"], "--needs: .*No such file.*/no/file"),
        (["--budget-shape", "calibrated"], "no needs of this model's heads come with h2o_mlxlm"),
        (["--budget-shape", "calibrated-layers"], "no needs of this model's heads come with h2o_mlxlm"),
    ],
)
def test_flags_that_do_not_fit_are_refused(tiny_folder, file, flags, message, capsys):
    given = [file if flag == "FILE" else flag for flag in flags]
    try:
        code = main(["generate", "--model", str(tiny_folder), "--prompt", "x", *given])
    except SystemExit as stopped:  # what a parser refuses
        code = stopped.code
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert re.search(message, error)


@pytest.mark.parametrize(("method", "groups"), [("calibrated", 3), ("calibrated-layers", 1)])
def test_eval_takes_a_file_and_tells_its_contents_apart(model, file, measured, method, groups):
    variant = Variant(f"{method} {file}", 96, "n_sink=2")
    caches = variant.caches(model)
    assert filled(model, caches) == measured.budgets_for(96, groups=groups)
    assert sum(c.config.grace for c in caches) >= 90  # half of 96 each, a share of it in each layer
    assert variant.config == Variant(f"{method} {file}", 96, "n_sink=2 grace=48 long_share=0.35").config
    before = variant.config
    save_needs(file, Needs(measured.model, (8, 32), tuple(reversed(LOSSES))), {})
    assert variant.config != before
    assert Variant(method, 24).config != Variant("h2o", 24).config
    with pytest.raises(OSError, match="No such file"):
        method_of(f"{method} /no/file")


@pytest.mark.parametrize("command", ["compare", "eval loss"])
def test_what_a_model_can_not_have_is_refused_before_anything_is_measured(tiny_folder, tmp_path, command, capsys):
    text = tmp_path / "text.txt"
    text.write_text("hello world " * 200)
    more = ["--prompt", "hello"] if command == "compare" else ["--out", str(tmp_path / "out"), "--text", str(text)]
    more += [] if command == "compare" else ["--context", "64", "--scored", "8", "--windows", "1"]
    code = main([*command.split(), "--model", str(tiny_folder), "--methods", "h2o", "calibrated", *more])
    out, error = capsys.readouterr()
    assert (code, out) == (2, "")
    assert "no needs of this model's heads come with h2o_mlxlm" in error
    assert 'or "calibrated DIR/needs.json" as the method' in error
    rows = tmp_path / "out" / "rows.csv"
    assert not rows.exists() or len(rows.read_text().splitlines()) <= 1


def test_compare_says_what_a_mean_head_keeps(tiny_folder, file, capsys):
    methods = ["h2o", f"calibrated {file}", f"calibrated-layers {file}"]
    flags = ["--budget", "96", "--max-tokens", "3", "--methods", *methods, "--settings", "n_sink=2", "--json"]
    assert main(["compare", "--model", str(tiny_folder), "--prompt", "hello " * 300, *flags]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [r["tokens_kept"] for r in results] == [96, 96, 96]
