"""Needs of heads on their way to the caches: from Python, and by the flags of commands."""

import json
import re

import mlx.core as mx
import mlx_lm
import pytest

from h2o_mlxlm import H2OConfig, Needs, SplitH2OKVCache, load, make_prompt_cache, needs, save_needs
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


def test_what_does_not_fit_is_refused_at_construction(model, measured, make_model):
    with pytest.raises(ValueError, match=r"needs of heads were measured on model .*, and this one is"):
        make_prompt_cache(make_model(num_hidden_layers=3), CONFIG, heads=measured)
    with pytest.raises(ValueError, match="divides the budget of one H2OConfig, got a list of 2"):
        make_prompt_cache(model, [CONFIG] * 2, heads=measured)
    with pytest.raises(ValueError, match=r"some heads keep 24 tokens where the mean is 96.*n_sink [+] grace must"):
        make_prompt_cache(model, H2OConfig(budget=96, n_sink=20), heads=measured)


def test_generate_goes_by_a_file(tiny_folder, file, measured, monkeypatch, capsys):
    made, real = [], mlx_lm.stream_generate

    def spy(*arguments, prompt_cache, **settings):
        made.extend(prompt_cache)
        return real(*arguments, prompt_cache=prompt_cache, **settings)

    monkeypatch.setattr(mlx_lm, "stream_generate", spy)
    flags = ["--budget", "96", "--n-sink", "2", "--max-tokens", "4", "--json", "--prompt", "hello " * 300]
    code = main(["generate", "--model", str(tiny_folder), *flags, "--budget-shape", "calibrated", "--needs", file])
    report = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [type(c) for c in made] == [SplitH2OKVCache] * 2
    assert held(made) == measured.budgets_for(96)
    assert (report["kept_tokens"], report["backend"], report["config"]["budget"]) == (96, "reference", 96)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--needs", "FILE"], "--needs is for --budget-shape calibrated alone, got equal"),
        (["--budget-shape", "calibrated", "--needs", "/no/file"], "--needs: .*No such file.*/no/file"),
        (["--budget-shape", "calibrated"], "no needs of this model's heads come with h2o_mlxlm"),
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


def test_eval_takes_a_file_and_tells_its_contents_apart(model, file, measured, tmp_path):
    variant = Variant(f"calibrated {file}", 96, "n_sink=2")
    assert filled(model, variant.caches(model)) == measured.budgets_for(96)
    before = variant.config
    save_needs(file, Needs(measured.model, (8, 32), tuple(reversed(LOSSES))), {})
    assert variant.config != before
    assert Variant("calibrated", 24).config != Variant("h2o", 24).config
    with pytest.raises(OSError, match="No such file"):
        method_of("calibrated /no/file")
