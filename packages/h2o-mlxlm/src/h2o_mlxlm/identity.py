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
