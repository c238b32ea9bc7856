"""A model fed as mlx_lm's ``generate_step`` feeds it, but with rows of equal length as one batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mlx.core as mx

Choose = Callable[[mx.array, int], mx.array]
"""(logits [B, V], step) to tokens [B]."""


def read_prompt(model: Any, caches: list[Any], tokens: mx.array, prefill_step_size: int) -> mx.array:
    """Feed all tokens [B, T] but the last in calls of ``prefill_step_size``, then the last alone.

    Returns:
        The last token's logits [B, V].
    """
    read_but_last(model, caches, tokens, prefill_step_size)
    logits: mx.array = model(tokens[:, -1:], cache=caches)[:, -1]
    return logits


def read_but_last(model: Any, caches: list[Any], tokens: mx.array, prefill_step_size: int) -> None:
    """Feed all tokens [B, T] but the last, in calls of ``prefill_step_size``."""
    most = tokens.shape[1] - 1
    for start in range(0, most, prefill_step_size):
        model(tokens[:, start : min(start + prefill_step_size, most)], cache=caches)
        mx.eval([c.state for c in caches])
        mx.clear_cache()


def continued(
    model: Any, caches: list[Any], tokens: mx.array, n_tokens: int, choose: Choose, prefill_step_size: int = 2048
) -> Iterator[mx.array]:
    """Continue rows of tokens [B, T], one token [B] of each at a time."""
    chosen = choose(read_prompt(model, caches, tokens, prefill_step_size), 0)
    mx.async_eval(chosen)
    for i in range(1, n_tokens):
        # The next step is under way before this one's tokens are looked at.
        following = choose(model(chosen[:, None], cache=caches)[:, -1], i)
        mx.async_eval(following)
        yield chosen
        chosen = following
        if i % 256 == 0:
            mx.clear_cache()
    yield chosen


def chooser(temp: float, seed: int, never: Sequence[int] = ()) -> Choose:
    """Make a choice of tokens: the likeliest at ``temp`` 0, else drawn, with the same lots for every cache.

    Args:
        temp: Temperature.
        seed: Of the lots.
        never: Tokens that are never chosen, such as the end of the text.
    """
    barred = mx.array([sorted(never)], mx.int32)

    def choose(logits: mx.array, step: int) -> mx.array:
        if barred.size:
            where = mx.broadcast_to(barred, (len(logits), barred.size))
            logits = mx.put_along_axis(logits, where, mx.array(-mx.inf, logits.dtype), -1)
        if temp == 0:
            return mx.argmax(logits, axis=-1)
        return mx.random.categorical(logits / temp, key=mx.random.key((seed << 32) + step))

    return choose


def log_probabilities(logits: mx.array) -> mx.array:
    """Normalise logits, in float32 whatever the model's dtype."""
    logits = logits.astype(mx.float32)
    return logits - mx.logsumexp(logits, axis=-1, keepdims=True)


def numbers(x: mx.array) -> Any:
    """Read an array out as numbers in lists; mlx's own annotation leaves their depth open."""
    return x.tolist()


def sizes(caches: list[Any], n_rows: int) -> dict[str, int]:
    """Say how many bytes and tokens the caches hold for each of their rows; tokens of the head with the most."""
    held = [mx.array(c.tokens_kept if hasattr(c, "tokens_kept") else c.size()) for c in caches]
    return {
        "cache_bytes": sum(int(c.nbytes) for c in caches) // n_rows,
        "tokens_kept": max(numbers(x.max()) for x in held),
    }


def templated(tokenizer: Any, text: str) -> list[int]:
    """Put a message into the chat template, or leave it as it is if the model has none."""
    if not tokenizer.has_chat_template:
        return list(tokenizer.encode(text))
    messages = [{"role": "user", "content": text}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return list(tokenizer.encode(whole, add_special_tokens=False))
