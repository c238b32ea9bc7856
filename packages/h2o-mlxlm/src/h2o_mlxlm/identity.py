"""What identifies a model and whatever was made with it: hashes of content, never a name or a path."""

import hashlib
import json
from typing import Any


def identity(*parts: Any) -> str:
    """Hash whatever makes two things comparable."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def model_identity(model: Any) -> str:
    """Hash a model's arguments and one of its weights: the smallest matrix."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    args = getattr(model, "args", None)
    weights: list[Any] = list(tree_flatten(model.parameters()))
    matrices = [(w.size, name, w) for name, w in weights if w.ndim > 1]
    _, name, weight = min(matrices, key=lambda m: m[:2])
    content = hashlib.sha256(bytes(memoryview(weight.astype(mx.float32)))).hexdigest()
    return identity(vars(args) if args is not None else type(model).__name__, name, str(weight.dtype), content)


def needs_identity(model: Any) -> str:
    """Hash what a model has in common with itself in another dtype, or quantised: its 1-D weights, and its depth.

    Norms and biases are never quantised. They are rounded to bfloat16, as a model is that is cast to it.

    Raises:
        ValueError: The model has no such weights.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten

    weights: list[Any] = list(tree_flatten(model.parameters()))
    rounded = {name: w.astype(mx.bfloat16).view(mx.uint16) for name, w in weights if w.ndim == 1}
    if not rounded:
        raise ValueError(f"{type(model).__module__} has no weights of one dimension (norms) to tell a model by")
    contents = [(name, hashlib.sha256(bytes(memoryview(w))).hexdigest()) for name, w in sorted(rounded.items())]
    return identity(contents, len(model.layers))
