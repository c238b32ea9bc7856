"""Texts, and the windows of tokens that loss is measured on."""

from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import Any

import mlx.core as mx


def read_texts(paths: Sequence[str] = ()) -> dict[str, str]:
    """Read texts by the names of their files; without files, those that the package carries.

    Raises:
        ValueError: Two files have one name, or none is packaged.
        OSError: A file can't be read.
    """
    if not paths:
        packaged = files("h2o_mlxlm") / "texts"
        found = sorted(packaged.iterdir(), key=lambda f: f.name) if packaged.is_dir() else []
        texts = {f.name.removesuffix(".txt"): f.read_text(encoding="utf-8") for f in found if f.name.endswith(".txt")}
        if not texts:
            raise ValueError("no texts are packaged: name files with --text")
        return texts
    texts = {Path(path).stem: Path(path).read_text(encoding="utf-8") for path in paths}
    if len(texts) < len(paths):
        raise ValueError(f"each --text file needs a name of its own, got {', '.join(paths)}")
    return texts


def checksums(texts: Mapping[str, str]) -> dict[str, str]:
    """Say by SHA-256 which texts these are."""
    return {name: sha256(text.encode()).hexdigest() for name, text in texts.items()}


def windows(tokenizer: Any, name: str, text: str, n_windows: int, length: int) -> mx.array:
    """Cut a text into disjoint windows from its start.

    Each begins with the token that the model expects at a text's start, if it has one.

    Args:
        tokenizer: The model's.
        name: For the error.
        text: The text.
        n_windows: How many.
        length: Tokens of each.

    Returns:
        int32 [n_windows, length].

    Raises:
        ValueError: The text is too short.
    """
    start = [t for t in tokenizer.encode("") if t == tokenizer.bos_token_id]
    # Not verbose: a text longer than the model reads is no mistake here.
    tokens = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    each = length - len(start)
    if len(tokens) < n_windows * each:
        raise ValueError(
            f"text {name!r} has {len(tokens)} tokens, and {n_windows} windows of {each} need {n_windows * each}: "
            "ask for fewer or shorter windows"
        )
    return mx.array([start + tokens[i * each : (i + 1) * each] for i in range(n_windows)], mx.int32)
