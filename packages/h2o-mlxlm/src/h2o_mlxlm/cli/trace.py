"""``h2o-mlxlm trace``: record what a model attends to on a text, to be replayed with ``h2o-sim``.

The file has each layer's tensors under ``layers.N.``, N its place among the model's caches, in the form that
``h2o_core.read_trace`` reads. Nothing is evicted while it is recorded.
"""

import argparse
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from h2o_mlxlm.cli import flags
from h2o_mlxlm.cli.loading import loaded

_COUNT = flags.number(1, 2**20, int)


def add_to(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("trace", help="Record a model's attention on a text", description=__doc__)
    add = parser.add_argument
    add("--model", help="Hub id, folder or .gguf file; the installed small model if not given")
    add("--text", required=True, metavar="FILE", help="What it reads, in UTF-8")
    add("--out", required=True, metavar="FILE.safetensors", help="The trace")
    add("--tokens", type=_COUNT, default=1024, help="Tokens of the text, at most (%(default)s)")
    add("--layers", type=_layer, nargs="+", default=["all"], metavar="N", help="Which, from 0, or all (%(default)s)")
    add(
        "--what",
        choices=["attention", "qkv"],
        default="qkv",
        help="Probabilities, which grow with the tokens' square, or queries, keys and values (%(default)s)",
    )
    add("--prefill-step-size", type=_COUNT, default=512, help="Tokens a call (%(default)s)")
    parser.set_defaults(run=run, verbose=True)


def run(args: argparse.Namespace) -> int:
    """Record a text and write the file."""
    if Path(args.out).suffix != ".safetensors":
        raise ValueError(f"a trace is written to a file that ends in .safetensors, got {args.out}")
    text = Path(args.text).read_text(encoding="utf-8")
    model, tokenizer = loaded(args.model)
    from h2o_core import write_trace

    tokens = list(tokenizer.encode(text))[: args.tokens]
    if not tokens:
        raise ValueError(f"{args.text} is empty: there is nothing to record")
    layers = None if "all" in args.layers else sorted(set(args.layers))
    recorded = record(model, tokens, layers, args.prefill_step_size)
    if args.what == "attention":
        recorded = {n: _attention(recording) for n, recording in recorded.items()}
    about = {
        "model": str(args.model or "installed"),
        "text": Path(args.text).name,
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
        "tokens": str(len(tokens)),
    }
    write_trace(args.out, recorded, about)
    size = Path(args.out).stat().st_size
    print(f"{args.out}: {args.what} of {len(recorded)} layers, {len(tokens)} tokens, {size / 1e6:.1f} MB")
    return 0


def record(model: Any, tokens: Sequence[int], layers: Sequence[int] | None = None, step: int = 512) -> dict[int, Any]:
    """Record queries, keys and values, where they have been rotated, of layers that attend to everything.

    Args:
        model: A model that ``load`` returned.
        tokens: What it reads, from an empty cache.
        layers: Places among the model's caches; None for every layer that can be recorded.
        step: Tokens a call.

    Returns:
        A ``h2o_core.Recording`` for each layer, by number.

    Raises:
        ValueError: A layer is not there, or its attention is not causal over all tokens.
    """
    import mlx.core as mx

    caches, full = _caches(model)
    chosen = full if layers is None else list(layers)
    if not set(chosen) <= set(full):
        raise ValueError(
            f"layers {', '.join(map(str, sorted(set(chosen) - set(full))))} can't be recorded: "
            f"those that attend to everything are {', '.join(map(str, full))}"
        )
    taps = {id(caches[n]): _Tap() for n in chosen}
    with _watched(lambda cache, *call: taps[id(cache)].take(*call) if id(cache) in taps else None):
        for start in range(0, len(tokens), step):
            model(mx.array([tokens[start : start + step]]), cache=caches)
            # Not the logits: what comes after the last layer that is recorded is never computed.
            mx.eval([tap.arrays for tap in taps.values()])
    return {n: taps[id(caches[n])].recording() for n in chosen}


class _Tap:
    """What passes the attention of one layer."""

    def __init__(self) -> None:
        self.queries: list[Any] = []
        self.seen = 0
        self.rows: tuple[Any, ...] = ()  # keys and values of all tokens so far
        self.scale = 0.0

    @property
    def arrays(self) -> list[Any]:
        return [*self.queries[-1:], *self.rows]

    def take(self, queries: Any, keys: Any, values: Any, scale: float, mask: Any, sinks: Any) -> None:
        import mlx.core as mx
        from mlx_lm.models.base import create_causal_mask

        n = queries.shape[2]
        if self.seen + n != keys.shape[2]:
            return  # a later layer that attends to this one's rows
        if sinks is not None:
            raise ValueError("attention with sink logits can't be recorded: its rows do not sum to 1")
        if isinstance(mask, mx.array) and not bool(mx.array_equal(mask, create_causal_mask(n, self.seen))):
            raise ValueError(
                "a layer attends under a mask that is not causal over all tokens: leave it out of --layers"
            )
        self.queries.append(queries)
        self.rows, self.scale, self.seen = (keys, values), scale, self.seen + n

    def recording(self) -> Any:
        import mlx.core as mx

        from h2o_core import Recording

        if not self.queries:
            raise ValueError("a layer's attention was never seen: its model attends with code of its own")
        keys, values = (x[0] for x in self.rows)
        return Recording(None, mx.concatenate(self.queries, axis=2)[0], keys, values, self.scale, keys.shape[0])


def _attention(recording: Any) -> Any:
    from h2o_core import Recording

    return Recording(attention=recording.rows().whole(), n_kv_heads=recording.n_kv_heads)


def _caches(model: Any) -> tuple[list[Any], list[int]]:
    """Fresh caches that evict nothing, and the places of those that can be recorded. Puts our hook in place."""
    from mlx_lm.models.cache import KVCache

    from h2o_core import H2OConfig
    from h2o_mlxlm.cache import H2OKVCache
    from h2o_mlxlm.integration import make_prompt_cache

    ours = make_prompt_cache(model, H2OConfig(), partial=True)
    full = [i for i, cache in enumerate(ours) if isinstance(cache, H2OKVCache)]
    return [KVCache() if i in full else cache for i, cache in enumerate(ours)], full


@contextmanager
def _watched(watch: Callable[..., None]) -> Iterator[None]:
    """Show every call that our hook hands on to mlx_lm's attention to ``watch``, for as long as this lasts."""
    from h2o_mlxlm import attention as hook

    plain = hook.plain_attention

    def watched(queries: Any, keys: Any, values: Any, *, cache: Any, scale: float, mask: Any, sinks: Any) -> Any:
        watch(cache, queries, keys, values, scale, mask, sinks)
        return plain(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    hook.plain_attention = watched
    try:
        yield
    finally:
        hook.plain_attention = plain


def _layer(text: str) -> int | str:
    """Read a layer's number, or ``all``."""
    if text == "all":
        return text
    number: int = flags.number(0, 10**4, int)(text)
    return number
