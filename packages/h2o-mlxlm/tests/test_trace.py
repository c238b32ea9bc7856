"""``h2o-mlxlm trace``: what it records is what the model attends to."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache
from mlx_lm.models.gemma3_text import Model as Gemma
from mlx_lm.models.gemma3_text import ModelArgs as GemmaArgs

from h2o_core import H2OConfig, read_trace
from h2o_core.traces import layers_of
from h2o_mlxlm import attention, make_prompt_cache
from h2o_mlxlm.cli import main
from h2o_mlxlm.recording import _Tap, record

TEXT = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.fixture
def run(tiny_folder, tmp_path, capsys):
    """Run ``trace`` on the tiny model: exit code, standard output, standard error, the file."""
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8")

    def run(*arguments, text=text, out=tmp_path / "trace.safetensors"):
        named = ["--model", str(tiny_folder), "--text", str(text), "--out", str(out)]
        try:
            code = main(["trace", *named, *arguments])
        except SystemExit as exit_:
            code = exit_.code
        return code, *capsys.readouterr(), out

    return run


@pytest.mark.parametrize("step", [7, 100])
def test_each_token_receives_what_the_cache_counts(make_model, step):
    """The mass that our cache, which evicts nothing here, is given by the model itself."""
    model, tokens = make_model(), [5 + i * i % 90 for i in range(40)]
    recorded = record(model, tokens, step=step)
    caches = make_prompt_cache(model, H2OConfig(budget=100, decay=1.0))
    model(mx.array([tokens]), cache=caches)
    assert list(recorded) == [0, 1]
    for cache, recording in zip(caches, recorded.values(), strict=True):
        whole = recording.rows().whole()
        assert whole.shape == (4, 40, 40)
        received = whole.reshape(2, 2, 40, 40).mean(axis=1).sum(axis=1)
        assert mx.allclose(cache.totals[0], received, atol=1e-4)
        # Keys where the model put them.
        assert mx.allclose(cache.keys[0, :, :40], recording.keys, atol=1e-5)


def test_the_hook_is_as_it_was_afterwards(make_model, monkeypatch):
    plain, model = attention.plain_attention, make_model()
    record(model, [1, 2, 3], [1])
    assert attention.plain_attention is plain
    monkeypatch.setattr(KVCache, "update_and_fetch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record(model, [1, 2, 3])
    assert attention.plain_attention is plain


def test_queries_keys_and_values_by_default(run):
    code, out, err, file = run("--tokens", "30", "--prefill-step-size", "8")
    assert (code, layers_of(file)) == (0, [0, 1])
    assert out.startswith(f"{file}: qkv of 2 layers, 30 tokens, ")
    assert "Traceback" not in err
    recording = read_trace(file, 1)
    assert recording.queries.shape == (4, 30, 16)
    assert recording.keys.shape == recording.values.shape == (2, 30, 16)
    assert (recording.scale, recording.n_kv_heads) == (0.25, 2)
    # A later call's rows have the tokens before it in view.
    assert run("--tokens", "30", "--layers", "1", "--prefill-step-size", "100")[0] == 0
    assert mx.allclose(read_trace(file).queries, recording.queries, atol=1e-4)


def test_attention_is_that_of_queries_and_keys(run):
    file = run("--tokens", "20", "--layers", "0")[3]
    expected = read_trace(file).rows().whole()
    assert run("--tokens", "20", "--layers", "0", "--what", "attention")[0] == 0
    recording = read_trace(file, 0)
    assert recording.n_kv_heads == 2
    assert mx.allclose(recording.attention, expected, atol=1e-6)


def test_a_layer_with_a_window_is_left_out_or_refused():
    args = GemmaArgs(
        model_type="gemma3_text",
        hidden_size=32,
        num_hidden_layers=3,
        intermediate_size=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        vocab_size=40,
        sliding_window=8,
        sliding_window_pattern=3,
    )
    model = Gemma(args)
    assert list(record(model, [1, 2, 3, 4], step=3)) == [2]
    with pytest.raises(ValueError, match="layers 0, 1 can't be recorded: those that attend to everything are 2"):
        record(model, [1, 2, 3], [0, 1, 2])


def test_what_is_no_plain_causal_attention_is_refused():
    q, kv = mx.ones((1, 2, 3, 4)), mx.ones((1, 1, 3, 4))
    window = mx.eye(3) > 0
    with pytest.raises(ValueError, match="a mask that is not causal over all tokens"):
        _Tap().take(q, kv, kv, 0.5, window, None)
    with pytest.raises(ValueError, match="sink logits can't be recorded"):
        _Tap().take(q, kv, kv, 0.5, "causal", mx.ones((2,)))
    with pytest.raises(ValueError, match="never seen"):
        _Tap().recording()
    tap = _Tap()
    tap.take(q, kv, kv, 0.5, mx.tri(3) > 0, None)
    # A later layer that shares these rows brings queries of its own.
    tap.take(2 * q, kv, kv, 0.5, "causal", None)
    assert mx.array_equal(tap.recording().queries, q[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "2"], "layers 2 can't be recorded: those that attend to everything are 0, 1"),
        (["--layers", "x"], "must be a number, got 'x'"),
        (["--tokens", "0"], "must be between 1 and"),
    ],
)
def test_bad_flags_are_one_line(run, arguments, message):
    code, out, err, _ = run(*arguments)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]


def test_bad_files_are_one_line(run, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    code, _, err, _ = run(out=tmp_path / "trace.txt")
    assert (code, err.count("\n")) == (2, 1)
    assert "ends in .safetensors" in err
    assert run(text=tmp_path / "none.txt")[0] == 2
    assert run(out=tmp_path / "no" / "folder.safetensors")[0] == 2
    # The tokenizer puts a token in front of any text.
    assert run(text=tmp_path / "empty.txt")[0] == 0
