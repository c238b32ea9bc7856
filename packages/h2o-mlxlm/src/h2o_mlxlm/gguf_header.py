"""What a GGUF file says of itself before its weights, and whether that is a model we can convert.

Never reads a weight. What is neither known nor without effect is refused: it would be silently wrong.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

ARCHITECTURES = ("llama", "mistral")
WEIGHT_TYPES = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1")
NORM_TYPES = ("F32", "F16")
PRE_TOKENIZERS = ("smollm", "gpt-2", "llama-bpe")

SETTINGS = (
    "vocab_size",
    "context_length",
    "embedding_length",
    "block_count",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.value_length",
    "attention.layer_norm_rms_epsilon",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "tensor_data_layout",
)
"""Keys of the architecture that are honoured, or that say nothing of how the model computes."""

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


class Header(NamedTuple):
    """A GGUF file's fields, and its tensors by name."""

    fields: dict[str, Any]
    types: dict[str, str]
    shapes: dict[str, tuple[int, ...]]  # rows first

    def name(self, key: str) -> str:
        """Return the key with the architecture in the place of ``{arch}``."""
        return key.replace("{arch}", str(self.fields.get("general.architecture")))

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field, or the default if it is not there."""
        return self.fields.get(self.name(key), default)

    def need(self, key: str) -> Any:
        """Return a field that must be there."""
        value = self.get(key)
        if value is None:
            raise ValueError(f"the GGUF file has no {self.name(key)}, which a model needs")
        return value

    def count(self, key: str) -> int:
        """Return a field that must be one positive integer, equal in all layers."""
        value = self.need(key)
        if not isinstance(value, int) or value < 1:
            refuse(self.name(key), value, "one positive integer")
        return value

    @property
    def head_dim(self) -> int:
        """Width of a query or key head."""
        if self.get("{arch}.attention.key_length"):
            return self.count("{arch}.attention.key_length")
        return self.count("{arch}.embedding_length") // self.count("{arch}.attention.head_count")

    @property
    def rope_factor(self) -> float:
        """How far linear scaling stretches the positions; 1 without. Linear is what no type means."""
        linear = self.get("{arch}.rope.scaling.type", "linear") == "linear"
        return float(self.get("{arch}.rope.scaling.factor") or 1) if linear else 1.0


def refuse(what: str, got: Any, allowed: str | Iterable[str]) -> NoReturn:
    """Say what can't be converted, its value, and what can."""
    allowed = allowed if isinstance(allowed, str) else ", ".join(allowed)
    raise ValueError(f"GGUF {what} {got} is not supported, only {allowed}: pass an MLX model instead")


def read_header(path: Path) -> Header:
    """Read the fields and the tensors' types and shapes of a GGUF file.

    Raises:
        ValueError: It is no GGUF file, or is cut short.
    """
    from gguf import GGUFReader

    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path} is not a GGUF file: it does not begin with GGUF")
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, KeyError, IndexError, OverflowError) as error:
        raise ValueError(f"{path} is cut short or damaged: {error}") from error
    if reader.byte_order != "I":
        refuse("byte order", "swapped", "this machine's own")
    return Header(
        fields,
        {tensor.name: tensor.tensor_type.name for tensor in reader.tensors},
        {tensor.name: tuple(tensor.shape.tolist()[::-1]) for tensor in reader.tensors},
    )


def check(header: Header) -> None:
    """Refuse what can't be converted.

    Raises:
        ValueError: Names the first thing that is not supported, its value, and what is.
    """
    for what, key, allowed in (
        ("architecture", "general.architecture", ARCHITECTURES),
        ("tokenizer", "tokenizer.ggml.model", ("gpt2",)),
        ("pre-tokenizer", "tokenizer.ggml.pre", PRE_TOKENIZERS),
    ):
        if header.get(key) not in allowed:
            refuse(what, header.get(key), allowed)
    for name, kind in sorted(header.types.items()):
        supported = NORM_TYPES if "norm" in name else WEIGHT_TYPES
        if kind not in supported:
            refuse(f"weight type of {name},", kind, supported)
    _check_settings(header)
    _check_tensors(header)


def mlx_name(name: str) -> str:
    """mlx_lm's name of a llama.cpp tensor, or of its ``scales`` and ``biases``."""
    stem, _, suffix = name.rpartition(".")
    block = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    return f"model.layers.{block[1]}.{_TENSORS[block[2]]}.{suffix}" if block else f"{_TENSORS[stem]}.{suffix}"


def _check_settings(header: Header) -> None:
    known = {header.name(f"{{arch}}.{key}") for key in SETTINGS}
    for key, value in header.fields.items():
        # A number that is zero turns its feature off.
        off = not isinstance(value, bool) and value == 0
        if key.startswith(header.name("{arch}.")) and key not in known and not off:
            refuse(f"setting {key}", value, "those of a dense llama model with full attention")
    width, heads = header.head_dim, header.count("{arch}.attention.head_count")
    for key, allowed in (
        ("rope.scaling.type", ("none", "linear")),
        ("rope.dimension_count", (width,)),
        ("attention.value_length", (width,)),
        ("attention.head_count_kv", [n for n in range(1, heads + 1) if heads % n == 0]),
    ):
        value = header.get(f"{{arch}}.{key}")
        if value is not None and value not in allowed:
            refuse(key, value, map(str, allowed))


def _check_tensors(header: Header) -> None:
    expected = _expected_shapes(header)
    for name, shape in sorted(header.shapes.items()):
        if name not in expected:
            refuse("tensor", name, "those of a dense llama model")
        if shape != expected[name]:
            refuse(f"tensor {name} of shape", shape, str(expected[name]))
    missing = sorted(expected.keys() - header.shapes.keys())
    if missing:
        raise ValueError(f"the GGUF file has no tensor {missing[0]}: pass one that holds the whole model")


def _expected_shapes(header: Header) -> dict[str, tuple[int, ...]]:
    hidden, inner = header.count("{arch}.embedding_length"), header.count("{arch}.feed_forward_length")
    queries = header.count("{arch}.attention.head_count") * header.head_dim
    keys = header.count("{arch}.attention.head_count_kv") * header.head_dim
    vocabulary = len(header.need("tokenizer.ggml.tokens"))
    block = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "ffn_norm": (hidden,),
        "ffn_gate": (inner, hidden),
        "ffn_up": (inner, hidden),
        "ffn_down": (hidden, inner),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"blk.{i}.{name}.weight": shape
        for i in range(header.count("{arch}.block_count"))
        for name, shape in block.items()
    }
    shapes |= {"token_embd.weight": (vocabulary, hidden), "output_norm.weight": (hidden,)}
    # Without it the embedding is the output matrix too.
    if "output.weight" in header.shapes:
        shapes["output.weight"] = (vocabulary, hidden)
    return shapes
