"""A GGUF file as a folder that mlx_lm loads: checked by its header, converted once, kept in the cache folder.

Reads llama.cpp's file by the ``gguf`` package (header) and ``mx.load`` (weights); writes what mlx_lm knows.
"""

import hashlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from h2o_mlxlm.gguf_header import Header, check, mlx_name, read_header
from h2o_mlxlm.gguf_tokenizer import write_tokenizer

LAYOUT = 2
"""Raised when the converted folder's content changes, so that old folders are left alone."""


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
        # The weights last: all that can be refused is in the header.
        write_tokenizer(header, made)
        config = _config(header)
        tensors = _read_weights(path, header)
        _write_model(config, tensors, made)
        try:
            made.rename(folder)
        except OSError:
            # Another process was first; its folder has the same content.
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return folder


def _read_weights(source: Path, header: Header) -> dict[str, Any]:
    """The weights by mlx_lm's names, in one floating type."""
    import mlx.core as mx

    matrices = {kind for name, kind in header.types.items() if "norm" not in name}
    dtype = mx.float32 if "F32" in matrices else mx.float16
    heads = {
        "q_proj": header.count("{arch}.attention.head_count"),
        "k_proj": header.count("{arch}.attention.head_count_kv"),
    }
    loaded = mx.load(str(source))
    if not isinstance(loaded, dict):
        raise ValueError(f"{source} holds no named tensors")
    tensors: dict[str, mx.array] = {}
    for name, array in loaded.items():
        target = mlx_name(name)
        projection = target.split(".")[-2]
        if projection in heads:
            array = _half_split(array, heads[projection])
        tensors[target] = array.astype(dtype) if mx.issubdtype(array.dtype, mx.floating) else array
    return tensors


def _write_model(config: dict[str, Any], tensors: dict[str, Any], folder: Path) -> None:
    import mlx.core as mx

    mx.save_safetensors(str(folder / "model.safetensors"), tensors, {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config | _quantization(tensors), indent=1))


def _half_split(array: Any, n_heads: int) -> Any:
    """Undo llama.cpp's interleaving of rotary pairs: rows (i, i + D/2) of a head are its pair i."""
    pairs = array.reshape(n_heads, array.shape[0] // n_heads // 2, 2, *array.shape[1:])
    return pairs.swapaxes(1, 2).reshape(array.shape)


def _config(header: Header) -> dict[str, Any]:
    """The config.json of mlx_lm's llama model."""
    # Whatever ends a text or a turn ends the generation.
    ends = [header.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    config = {
        "model_type": header.need("general.architecture"),
        "hidden_size": header.count("{arch}.embedding_length"),
        "num_hidden_layers": header.count("{arch}.block_count"),
        "intermediate_size": header.count("{arch}.feed_forward_length"),
        "num_attention_heads": header.count("{arch}.attention.head_count"),
        "num_key_value_heads": header.count("{arch}.attention.head_count_kv"),
        "head_dim": header.head_dim,
        "rms_norm_eps": header.need("{arch}.attention.layer_norm_rms_epsilon"),
        "vocab_size": len(header.need("tokenizer.ggml.tokens")),
        "max_position_embeddings": header.count("{arch}.context_length"),
        "rope_theta": header.get("{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in header.types,
        "bos_token_id": header.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted({token for token in ends if token is not None}) or None,
    }
    if header.rope_factor != 1:
        config["rope_scaling"] = {"type": "linear", "factor": header.rope_factor}
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
