"""A model, its prompt, and what mlx_lm's ``generate_step`` does with them, one call at a time."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import mlx.core as mx


def model_for(name: str | None, random: Sequence[int] | None, dtype: str = "float32") -> Any:
    """Load a model, or make a random one.

    Args:
        name: As ``h2o_mlxlm.load`` takes it; None is the installed small model.
        random: LAYERS, HIDDEN, HEADS, KV of a Llama with random weights, instead of ``name``.
        dtype: Of the random one.
    """
    if random is not None:
        n_layers, hidden, n_heads, n_kv_heads = random
        return random_llama(n_layers, hidden, n_heads, n_kv_heads, dtype)
    from h2o_mlxlm.models import load

    return load(name)[0]


def random_llama(n_layers: int, hidden: int, n_heads: int, n_kv_heads: int, dtype: str = "float32") -> Any:
    """Make a Llama with random weights and a vocabulary of 1,024.

    Args:
        n_layers: Layers.
        hidden: Width, a multiple of ``n_heads``; the inner width is 3 times it.
        n_heads: Query heads, a multiple of ``n_kv_heads``.
        n_kv_heads: KV heads.
        dtype: Of weights, keys and values.

    Raises:
        ValueError: A width or number of heads is no multiple.
    """
    if hidden % n_heads or n_heads % n_kv_heads:
        raise ValueError(
            f"a random Llama needs HIDDEN a multiple of HEADS and HEADS of KV, got {hidden}, {n_heads}, {n_kv_heads}"
        )
    import mlx.core as mx
    from mlx_lm.models.llama import Model, ModelArgs

    mx.random.seed(0)
    model = Model(
        ModelArgs(
            model_type="llama",
            hidden_size=hidden,
            num_hidden_layers=n_layers,
            intermediate_size=3 * hidden,
            num_attention_heads=n_heads,
            num_key_value_heads=n_kv_heads,
            rms_norm_eps=1e-5,
            vocab_size=1024,
        )
    )
    model.set_dtype(getattr(mx, dtype))
    mx.eval(model.parameters())
    return model


def head_dim_of(model: Any) -> int:
    """The width of the model's keys."""
    args = model.args
    return int(getattr(args, "head_dim", None) or args.hidden_size // args.num_attention_heads)


def tokens_for(model: Any, n_tokens: int, batch: int = 1) -> "mx.array":
    """Draw a prompt [B, n], the same every time; what it says does not change what it costs."""
    import mlx.core as mx

    tokens = mx.random.randint(0, model.args.vocab_size, (batch, n_tokens), key=mx.random.key(0))
    mx.eval(tokens)
    return tokens


def prefill(model: Any, caches: list[Any], tokens: "mx.array", chunk: int) -> "mx.array":
    """Run a prompt [B, n] as ``generate_step`` does: all but its last token in chunks, then that one.

    Returns:
        The first new token of each sequence [B, 1].
    """
    from h2o_mlxlm.evaluation.passes import read_but_last

    read_but_last(model, caches, tokens, chunk)
    return decode(model, caches, tokens[:, -1:])


def decode(model: Any, caches: list[Any], token: "mx.array") -> "mx.array":
    """Run one token [B, 1] of each sequence and wait for the next, which is the likeliest."""
    import mlx.core as mx

    following = _likeliest(model, caches, token)
    mx.eval(following)
    return following


def generate(model: Any, caches: list[Any], n_tokens: int, token: "mx.array") -> None:
    """Run ``n_tokens`` as ``generate_step`` does: the graph of the next is built while one is computed."""
    import mlx.core as mx

    following = _likeliest(model, caches, token)
    mx.async_eval(following)
    for _ in range(n_tokens - 1):
        token, following = following, _likeliest(model, caches, following)
        mx.async_eval(following)
        mx.eval(token)
    mx.eval(following)


def _likeliest(model: Any, caches: list[Any], token: "mx.array") -> "mx.array":
    import mlx.core as mx

    logits = model(token, cache=caches)[:, -1]
    return mx.argmax(logits - mx.logsumexp(logits, axis=-1, keepdims=True), axis=-1, keepdims=True)
