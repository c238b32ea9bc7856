"""A GGUF file, written as llama.cpp's converter writes it, gives the original model's logits and text."""

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import gguf
import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

import h2o_mlxlm
from h2o_mlxlm.gguf_file import convert
from h2o_mlxlm.gguf_header import mlx_name

TEXT = "hello world, don't 12345 678  and naïve 漢字 🙂 .\n\tEnd ,"
TOLERANCE = 1e-5  # of the largest logit
BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "h2o-mlxlm"


def forbid_loading(monkeypatch):
    def load(*_, **__):
        pytest.fail("a weight was read")

    monkeypatch.setattr(mx, "load", load)


@pytest.fixture
def never_load(monkeypatch):
    forbid_loading(monkeypatch)


def theirs(name):
    """llama.cpp's name of a weight of mlx_lm's, written down independently of the converter."""
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem = name.removesuffix(".weight")
    block = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", stem)
    return f"blk.{block[1]}.{({v: k for k, v in BLOCK.items()})[block[2]]}.weight" if block else f"{top[stem]}.weight"


def interleaved(name, weight):
    """The rows of q and k in llama.cpp's order."""
    heads = 4 if "attn_q." in name else 2 if "attn_k." in name else None
    if heads is None:
        return weight
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


class Maker:
    """Writes the GGUF file of a model, with changed fields and tensors."""

    def __init__(self, folder, vocabulary, make_model):
        self.folder, self.vocabulary, self.make_model = folder, vocabulary, make_model

    def fields(self, arch):
        tokens, merges = self.vocabulary
        return {
            f"{arch}.block_count": 2,
            f"{arch}.context_length": 512,
            f"{arch}.embedding_length": 64,
            f"{arch}.feed_forward_length": 96,
            f"{arch}.attention.head_count": 4,
            f"{arch}.attention.head_count_kv": 2,
            f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
            f"{arch}.rope.dimension_count": 16,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3),
            "tokenizer.ggml.merges": [" ".join(m) for m in merges],
            "tokenizer.ggml.bos_token_id": 0,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|end|>{% endfor %}",
        }

    def write(self, kind="F32", arch="llama", fields=None, tensors=None, tied=True, named="tiny.gguf"):
        """Write the file; a None among the changes leaves that field or tensor out."""
        path = self.folder / named
        writer = gguf.GGUFWriter(path, arch)
        for key, value in (self.fields(arch) | (fields or {})).items():
            add(writer, key, value)
        weights = {
            theirs(n): np.array(w) for n, w in tree_flatten(self.make_model(tie_word_embeddings=tied).parameters())
        }
        for name, weight in (weights | (tensors or {})).items():
            if weight is not None:
                stored = gguf.GGMLQuantizationType["F32" if weight.ndim == 1 else kind]
                writer.add_tensor(name, gguf.quants.quantize(interleaved(name, weight), stored), raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    def original(self, kind="F32", tied=True, **changes):
        """The model that the file describes, matrices rounded as the file's are, norms as the folder's are."""
        model = self.make_model(tie_word_embeddings=tied, **changes)
        stored = gguf.GGMLQuantizationType[kind]

        def rounded(weight):
            if weight.ndim == 1:
                return weight if kind == "F32" else weight.astype(mx.float16).astype(mx.float32)
            return mx.array(gguf.quants.dequantize(gguf.quants.quantize(np.array(weight), stored), stored))

        model.load_weights([(n, rounded(w)) for n, w in tree_flatten(model.parameters())])
        return model


def add(writer, key, value):
    if value is None:
        return
    for kind, method in ((bool, "bool"), (int, "uint32"), (float, "float32"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            getattr(writer, f"add_{method}")(key, value)
            return


@pytest.fixture
def maker(tmp_path, vocabulary, make_model):
    return Maker(tmp_path, vocabulary, make_model)


def logits(model):
    return np.array(model(mx.array([[0, *range(40, 80)]])))


def assert_same(model, original):
    got, want = logits(model), logits(original)
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * np.abs(want).max())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("arch", ["llama", "mistral"])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
def test_the_converted_model_gives_the_originals_logits(maker, kind, arch, tied):
    model, _ = h2o_mlxlm.load(str(maker.write(kind, arch, tied=tied)))
    assert_same(model, maker.original(kind, tied))


@pytest.mark.parametrize(
    ("fields", "same"),
    [
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope_scaling": {"type": "linear", "factor": 4}},
        ),
        ({"rope.scaling.factor": 4.0}, {"rope_scaling": {"type": "linear", "factor": 4}}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {}),
        ({"rope.freq_base": 500.0}, {"rope_theta": 500.0}),
        ({"attention.layer_norm_rms_epsilon": 0.5}, {"rms_norm_eps": 0.5}),
        ({"attention.key_length": 16, "attention.value_length": 16}, {}),
        ({"expert_count": 0, "attention.sliding_window": 0}, {}),
    ],
)
def test_a_setting_means_what_llama_cpp_means_by_it(maker, fields, same):
    model, _ = h2o_mlxlm.load(str(maker.write(fields={f"llama.{k}": v for k, v in fields.items()})))
    assert_same(model, maker.original(**same))


def test_heads_may_be_wider_than_the_hidden_size_divides(maker):
    shapes = {"attn_q": (128, 64), "attn_k": (64, 64), "attn_v": (64, 64), "attn_output": (64, 128)}
    original = maker.original(head_dim=32)
    weights = {theirs(n): np.array(w) for n, w in tree_flatten(original.parameters())}
    assert all(weights[f"blk.0.{name}.weight"].shape == shape for name, shape in shapes.items())
    fields = {"llama.attention.key_length": 32, "llama.attention.value_length": 32, "llama.rope.dimension_count": 32}
    model, _ = h2o_mlxlm.load(str(maker.write(fields=fields, tensors=weights)))
    assert_same(model, original)


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [("smollm", ["1", "2", "3", "4", "5"]), ("gpt-2", ["1234", "5"]), ("llama-bpe", ["123", "4", "5"])],
)
def test_text_survives_and_digits_split_as_the_pre_tokenizer_says(maker, pre, pieces):
    _, tokenizer = h2o_mlxlm.load(str(maker.write(fields={"tokenizer.ggml.pre": pre})))
    assert tokenizer.decode(tokenizer.encode(TEXT, add_special_tokens=False)) == TEXT
    ids = tokenizer.encode("12345", add_special_tokens=False)
    assert tokenizer.convert_ids_to_tokens(ids) == pieces
    assert tokenizer.encode("<|bos|>hello<|end|>", add_special_tokens=False)[::2] == [0, 1]
    assert tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False) == "[user]x<|end|>"
    assert tokenizer.eos_token_ids == {1}


def test_a_word_that_is_a_token_is_taken_whole_only_with_llama_3s_tokenizer(maker, vocabulary):
    tokens = [*vocabulary[0], "zebra"]
    fields = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3, 3, 3] + [1] * (len(tokens) - 3)}
    embedding = {"token_embd.weight": np.ones((len(tokens), 64), np.float32)}
    for pre, n in (("llama-bpe", 1), ("gpt-2", 5)):
        path = maker.write(fields=fields | {"tokenizer.ggml.pre": pre}, tensors=embedding)
        _, tokenizer = h2o_mlxlm.load(str(path))
        assert len(tokenizer.encode("zebra", add_special_tokens=False)) == n


@pytest.mark.parametrize(
    ("pre", "asked", "begins"),
    [("smollm", True, True), ("smollm", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_the_first_token_is_added_when_the_file_says_so(maker, pre, asked, begins):
    fields = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": asked}
    _, tokenizer = h2o_mlxlm.load(str(maker.write(fields=fields)))
    ids = tokenizer.encode("hello")
    assert ids[0] == 0 if begins else 0 not in ids
    assert tokenizer.encode("hello", add_special_tokens=False) == ids[begins:]


def test_the_end_of_a_turn_ends_the_text_too(maker):
    _, tokenizer = h2o_mlxlm.load(str(maker.write(fields={"tokenizer.ggml.eot_token_id": 2})))
    assert tokenizer.eos_token_ids == {1, 2}


def test_a_file_is_converted_once(maker, cache, monkeypatch):
    path = maker.write()
    first = convert(path)
    times = {f: f.stat().st_mtime_ns for f in [first, *first.iterdir()]}
    forbid_loading(monkeypatch)
    assert convert(path) == first
    assert {f: f.stat().st_mtime_ns for f in [first, *first.iterdir()]} == times
    assert list(cache.iterdir()) == [first]


def test_another_content_is_another_folder(maker):
    first = convert(maker.write())
    assert convert(maker.write(fields={"llama.rope.freq_base": 5.0})) != first


@pytest.mark.parametrize("pool", [ThreadPoolExecutor, ProcessPoolExecutor])
def test_two_at_once_both_succeed(maker, cache, pool):
    path = maker.write()
    context = {"mp_context": multiprocessing.get_context("spawn")} if pool is ProcessPoolExecutor else {}
    with pool(2, **context) as workers:
        folders = set(workers.map(convert, [path, path]))
    assert list(cache.iterdir()) == list(folders)
    h2o_mlxlm.load(str(path))


def test_a_failure_leaves_nothing_behind(maker, cache, monkeypatch):
    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr(mx, "save_safetensors", full)
    with pytest.raises(OSError, match="no space left"):
        convert(maker.write())
    assert list(cache.iterdir()) == []


def zeros(*shape):
    return np.zeros(shape, np.float32)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "qwen2"}, "architecture qwen2 is not supported, only llama, mistral"),
        ({"kind": "BF16"}, "type of blk.0.attn_k.weight, BF16 is not supported, only F32, F16, Q8_0, Q4_0, Q4_1"),
        ({"fields": {"tokenizer.ggml.model": "llama"}}, "tokenizer llama is not supported, only gpt2"),
        ({"fields": {"tokenizer.ggml.pre": "qwen2"}}, "pre-tokenizer qwen2 is not .* smollm, gpt-2, llama-bpe"),
        ({"fields": {"tokenizer.ggml.pre": None}}, "pre-tokenizer None is not supported, only smollm"),
        ({"fields": {"tokenizer.ggml.add_eos_token": True}}, "add_eos_token True is not supported, only False"),
        ({"fields": {"tokenizer.ggml.eos_token_id": 9999}}, "eos_token_id 9999 is not supported, only 0 to"),
        ({"fields": {"tokenizer.ggml.merges": ["q q"]}}, "merges 'q q', which its vocabulary does not hold"),
        ({"fields": {"tokenizer.ggml.token_type": [1]}}, "tokens must be distinct and have a type each"),
        (
            {"fields": {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}},
            "has no tokenizer.ggml.bos_token_id",
        ),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type yarn is not supported, only none, linear"),
        ({"fields": {"llama.rope.dimension_count": 8}}, "rope.dimension_count 8 is not supported, only 16"),
        ({"fields": {"llama.rope.scale_linear": 2.0}}, "setting llama.rope.scale_linear 2.0 is not supported"),
        ({"fields": {"llama.attention.value_length": 8}}, "attention.value_length 8 is not supported, only 16"),
        ({"fields": {"llama.attention.sliding_window": 4096}}, "setting llama.attention.sliding_window 4096 is not"),
        ({"fields": {"llama.attention.causal": False}}, "setting llama.attention.causal False is not"),
        ({"fields": {"llama.attention.scale": 0.5}}, "setting llama.attention.scale 0.5 is not supported"),
        (
            {"fields": {"llama.attention.head_count_kv": [2, 1]}},
            r"head_count_kv \[2, 1\] is not supported, only 1, 2, 4",
        ),
        ({"fields": {"llama.attention.head_count_kv": 3}}, "head_count_kv 3 is not supported, only 1, 2, 4"),
        (
            {"fields": {"llama.feed_forward_length": [96, 64]}},
            r"feed_forward_length \[96, 64\] .* one positive integer",
        ),
        ({"fields": {"llama.expert_count": 8}}, "setting llama.expert_count 8 is not supported"),
        ({"fields": {"llama.context_length": None}}, "has no llama.context_length, which a model needs"),
        ({"fields": {"llama.block_count": 1}}, "tensor blk.1.attn_k.weight is not supported, only those of a dense"),
        (
            {"tensors": {"blk.0.ffn_gate_exps.weight": zeros(2, 32)}},
            "tensor blk.0.ffn_gate_exps.weight is not supported",
        ),
        ({"tensors": {"rope_freqs.weight": zeros(8)}}, "tensor rope_freqs.weight is not supported"),
        ({"tensors": {"blk.0.attn_q.bias": zeros(64)}}, "tensor blk.0.attn_q.bias is not supported"),
        ({"tensors": {"blk.1.ffn_up.weight": None}}, "has no tensor blk.1.ffn_up.weight"),
        (
            {"tensors": {"blk.1.ffn_up.weight": zeros(64, 64)}},
            r"tensor blk.1.ffn_up.weight of shape \(64, 64\) is not supported, only \(96, 64\)",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_would_be_wrong_is_refused_before_a_weight_is_read(maker, cache, never_load, changes, message):
    with pytest.raises(ValueError, match=message) as raised:
        convert(maker.write(**changes))
    assert "\n" not in str(raised.value)
    assert not cache.exists() or list(cache.iterdir()) == []


def test_a_k_quant_is_refused(maker, never_load):
    path = maker.folder / "k.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in maker.fields("llama").items():
        add(writer, key, value)
    writer.add_tensor("blk.0.attn_q.weight", np.zeros((1, 144), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ValueError, match=r"attn_q.weight, Q4_K is not supported, only F32, F16, Q8_0, Q4_0, Q4_1"):
        convert(path)


def test_a_file_cut_anywhere_is_refused(maker, never_load):
    whole = maker.write().read_bytes()
    path = maker.folder / "cut.gguf"
    for end in [*range(4, 600, 7), *range(600, len(whole), 997), len(whole) - 64]:
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"cut short or damaged|has no") as raised:
            convert(path)
        assert "\n" not in str(raised.value)


def test_another_file_and_none_are_refused(tmp_path):
    path = tmp_path / "notes.gguf"
    path.write_text("notes")
    with pytest.raises(ValueError, match=r"notes.gguf is not a GGUF file: it does not begin with GGUF"):
        convert(path)
    with pytest.raises(FileNotFoundError, match=r"no GGUF file at missing.gguf"):
        convert(Path("missing.gguf"))


def test_the_names_are_llama_cpps(make_model):
    for name, _ in tree_flatten(make_model(tie_word_embeddings=False).parameters()):
        assert mlx_name(theirs(name)) == name
