"""``h2o-mlxlm trace``: record what a model attends to on a text, to be replayed with ``h2o-sim``.

The file has each layer's tensors under ``layers.N.``, N its place among the model's caches, in the form that
``h2o_core.read_trace`` reads. Nothing is evicted while it is recorded.
"""

import argparse
import hashlib
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
    from h2o_mlxlm.recording import record

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


def _attention(recording: Any) -> Any:
    from h2o_core import Recording

    return Recording(attention=recording.rows().whole(), n_kv_heads=recording.n_kv_heads)


def _layer(text: str) -> int | str:
    """Read a layer's number, or ``all``."""
    if text == "all":
        return text
    number: int = flags.number(0, 10**4, int)(text)
    return number
