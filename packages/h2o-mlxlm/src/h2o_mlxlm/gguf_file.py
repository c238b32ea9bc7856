"""A GGUF file as a folder that mlx_lm loads: checked by its header, converted once, kept in the cache folder.

Reads llama.cpp's file by the ``gguf`` package (header) and ``mx.load`` (weights); writes what mlx_lm knows.
"""

import hashlib
import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

LAYOUT = 1
"""Raised when the converted folder's content changes, so that old folders are left alone."""

ARCHITECTURES = ("llama", "mistral")
WEIGHT_TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")
PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe")

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
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
# The split of Llama 3's tokenizer, from its published tokenizer.json.
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONTROL, _USER_DEFINED = 3, 4


class Header(NamedTuple):
    """What a GGUF file says of itself before its weights."""

    fields: dict[str, Any]
    tensor_types: dict[str, str]

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field; ``{arch}`` in the key stands for the architecture."""
        return self.fields.get(key.format(arch=self.fields.get("general.architecture")), default)

    def need(self, key: str) -> Any:
        """Return a field that must be there."""
        value = self.get(key)
        if value is None:
            raise ValueError(f"the GGUF file has no {key.format(arch=self.get('general.architecture'))}")
        return value


def cache_folder() -> Path:
    """Return the folder for converted models: ``$XDG_CACHE_HOME`` or ``~/.cache``, then ``h2o-mlxlm``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "h2o-mlxlm"


def convert(path: Path) -> Path:
    """Make a folder that ``mlx_lm.load`` reads from a GGUF file, or find the one made before.

    The folder is named by the sha256 of the file and appears whole or not at all.

    Args:
        path: A ``.gguf`` file of a llama or mistral architecture.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no GGUF file, or holds something that can't be converted; found in the
            header, before any weight is read.
    """
    if not path.is_file():
        raise FileNotFoundError(f"no GGUF file at {path}")
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = cache_folder() / f"{path.stem}-{digest[:16]}-{LAYOUT}"
    if folder.is_dir():
        return folder
    header = read_header(path)
    check(header)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".converting-"))
    try:
        _write(path, header, made)
        try:
            made.rename(folder)
        except OSError:
            # Another process was first; its folder has the same content.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def read_header(path: Path) -> Header:
    """Read the fields and the tensor types of a GGUF file.

    Raises:
        ValueError: It is no GGUF file, or is cut short.
    """
    from gguf import GGUFReader

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF")
    try:
        reader = GGUFReader(path)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{path} is cut short or damaged: {error}") from error
    fields = {name: field.contents() for name, field in reader.fields.items()}
    return Header(fields, {tensor.name: tensor.tensor_type.name for tensor in reader.tensors})


def check(header: Header) -> None:
    """Refuse what can't be converted.

    Raises:
        ValueError: Names the first thing that is not supported, its value, and what is.
    """
    architecture = header.get("general.architecture")
    pre = header.get("tokenizer.ggml.pre", "gpt-2")
    types = sorted({kind for kind in header.tensor_types.values() if kind not in WEIGHT_TYPES})
    scaling = header.get("{arch}.rope.scaling.type", "none")
    unknown = sorted(name for name in header.tensor_types if _mlx_name(name) is None)
    for wrong, what, got, allowed in (
        (architecture not in ARCHITECTURES, "architecture", architecture, ", ".join(ARCHITECTURES)),
        (bool(types), "weight type", ", ".join(types), ", ".join(WEIGHT_TYPES)),
        (
            header.get("tokenizer.ggml.model") != "gpt2",
            "tokenizer",
            header.get("tokenizer.ggml.model"),
            "gpt2 (byte-level BPE)",
        ),
        (pre not in PRE_TOKENIZERS, "pre-tokenizer", pre, ", ".join(PRE_TOKENIZERS)),
        (scaling not in ("none", "linear"), "rope scaling", scaling, "none, linear"),
        (bool(unknown), "tensor", ", ".join(unknown[:3]), "those of a dense llama model"),
    ):
        if wrong:
            raise ValueError(f"GGUF {what} {got} is not supported, only {allowed}: pass an MLX model instead")


def _mlx_name(name: str) -> str | None:
    """mlx_lm's name of a llama.cpp tensor, or None."""
    stem, _, suffix = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    base = _TENSORS.get(block[2] if block else stem)
    if base is None or suffix not in ("weight", "scales", "biases"):
        return None
    return f"model.layers.{block[1]}.{base}.{suffix}" if block else f"{base}.{suffix}"


def _write(source: Path, header: Header, folder: Path) -> None:
    import mlx.core as mx

    matrices = {kind for name, kind in header.tensor_types.items() if "norm" not in name}
    dtype = mx.float32 if "F32" in matrices else mx.float16
    heads = {
        "q_proj": int(header.need("{arch}.attention.head_count")),
        "k_proj": int(header.need("{arch}.attention.head_count_kv")),
    }
    tensors: dict[str, mx.array] = {}
    loaded = mx.load(str(source))
    if not isinstance(loaded, dict):
        raise ValueError(f"{source} holds no named tensors")
    for name, array in loaded.items():
        target = str(_mlx_name(name))
        projection = target.split(".")[-2]
        if projection in heads:
            array = _half_split(array, heads[projection])
        tensors[target] = array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    config = _config(header, "lm_head.weight" not in tensors) | _quantization(tensors)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    _write_tokenizer(header, folder)


def _half_split(array: Any, n_heads: int) -> Any:
    """Undo llama.cpp's interleaving of rotary pairs: rows (i, i + D/2) of a head are its pair i."""
    pairs = array.reshape(n_heads, array.shape[0] // n_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _config(header: Header, tied: bool) -> dict[str, Any]:
    """The config.json of mlx_lm's llama model."""
    config = {
        "model_type": header.need("general.architecture"),
        "hidden_size": header.need("{arch}.embedding_length"),
        "num_hidden_layers": header.need("{arch}.block_count"),
        "intermediate_size": header.need("{arch}.feed_forward_length"),
        "num_attention_heads": header.need("{arch}.attention.head_count"),
        "num_key_value_heads": header.need("{arch}.attention.head_count_kv"),
        "rms_norm_eps": header.need("{arch}.attention.layer_norm_rms_epsilon"),
        "vocab_size": len(header.need("tokenizer.ggml.tokens")),
        "max_position_embeddings": header.need("{arch}.context_length"),
        "rope_theta": header.get("{arch}.rope.freq_base", 10000.0),
        "head_dim": header.get("{arch}.attention.key_length"),
        "tie_word_embeddings": tied,
        "bos_token_id": header.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.get("tokenizer.ggml.eos_token_id"),
    }
    if header.get("{arch}.rope.scaling.type", "none") == "linear":
        factor = header.need("{arch}.rope.scaling.factor")
        config["rope_scaling"] = {"type": "linear", "factor": factor}
    return {key: value for key, value in config.items() if value is not None}


def _quantization(tensors: dict[str, Any]) -> dict[str, Any]:
    """mlx_lm's description of the quantised matrices, from their shapes. GGUF's groups are of 32."""
    layers: dict[str, Any] = {}
    for name, scales in tensors.items():
        if name.endswith(".scales"):
            layer = name.removesuffix(".scales")
            bits = tensors[f"{layer}.weight"].shape[-1] // scales.shape[-1]
            layers[layer] = {"group_size": 32, "bits": bits}
    if not layers:
        return {}
    quantization = {"group_size": 32, "bits": 4} | layers
    return {"quantization": quantization, "quantization_config": quantization}


def _write_tokenizer(header: Header, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokens, kinds = header.need("tokenizer.ggml.tokens"), header.need("tokenizer.ggml.token_type")
    pre = header.get("tokenizer.ggml.pre", "gpt-2")
    merges = [tuple(merge.split(" ")) for merge in header.need("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as it is, whatever its merges.
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    for kind, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        added = [t for t, k in zip(tokens, kinds, strict=True) if k == kind]
        tokenizer.add_tokens([AddedToken(t, special=special, normalized=False) for t in added])
    named = {
        f"{name}_token": tokens[header.get(f"tokenizer.ggml.{key}_token_id")]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if header.get(f"tokenizer.ggml.{key}_token_id") is not None
    }
    if header.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        tokenizer.post_processor = _begins_with(named["bos_token"], vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **named}
    config["model_max_length"] = header.need("{arch}.context_length")
    if header.get("tokenizer.chat_template"):
        config["chat_template"] = header.get("tokenizer.chat_template")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1))


def _pre_tokenizer(pre: str) -> Any:
    """How text is split before merging, for each name of ``PRE_TOKENIZERS``."""
    from tokenizers import Regex, pre_tokenizers

    if pre == "llama-bpe":
        split = pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), "isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    return words


def _begins_with(bos: str, vocabulary: dict[str, int]) -> Any:
    from tokenizers import processors

    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
    )
