"""``h2o-mlxlm compare``: one prompt through several caches, the texts side by side."""

import argparse
import json
import shutil
import sys
import textwrap
import time
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from h2o_mlxlm.cli import evaluate, flags
from h2o_mlxlm.cli.loading import loaded, mean_of

NARROWEST = 40  # columns of text
GAP = "  "


def add_to(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("compare", help="One prompt through several caches", description=__doc__)
    add = parser.add_argument
    add("--model", help="Hub id, folder or .gguf file; the installed small model if not given")
    add("--prompt", "-p", required=True, help="Message to the model ('-' reads standard input)")
    evaluate.add_methods(parser, ["full", "recency", "h2o"])
    add("--budget", type=flags.number(5, 2**30, int), default=64, help="Tokens kept (%(default)s)")
    add("--max-tokens", "-m", type=flags.number(1, 2**31 - 1, int), default=200, help="Tokens of text (%(default)s)")
    add("--temp", type=flags.number(0, float("inf")), default=0.0, help="Sampling temperature (%(default)s)")
    add("--seed", type=flags.number(0, 2**31 - 1, int), default=0, help="Of sampling, and of lots (%(default)s)")
    add("--ignore-chat-template", action="store_true", help="Use the prompt as it is")
    add("--prefill-step-size", type=flags.number(1, 2**31 - 1, int), default=2048, help="Prompt tokens a call")
    add("--json", action="store_true", help="Print one JSON object and nothing else")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate with each method and print what came of it."""
    args.verbose = not args.json
    variants = evaluate.chosen_variants(args, [args.budget], [args.seed])
    text = sys.stdin.read() if args.prompt == "-" else args.prompt
    if not text.strip():
        raise ValueError("the prompt is empty: pass --prompt TEXT, or '-' and text on standard input")
    model, tokenizer = loaded(args.model)
    evaluate.check_caches(model, variants)
    prompt = _encode(args, tokenizer, text)
    results = [_generated(args, model, tokenizer, prompt, variant) for variant in variants]
    full = next((r["tokens"] for r in results if r["method"] == "full"), None)
    for result in results:
        result["differs_at"] = None if full is None else first_difference(full, result["tokens"])
    if args.json:
        print(json.dumps({"prompt_tokens": len(prompt), "results": results}))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
        print(layout([(header(r, full is not None), r["text"]) for r in results], width))
    return 0


def _encode(args: argparse.Namespace, tokenizer: Any, text: str) -> list[int]:
    from h2o_mlxlm.evaluation.passes import templated

    return list(tokenizer.encode(text)) if args.ignore_chat_template else templated(tokenizer, text)


def _generated(args: argparse.Namespace, model: Any, tokenizer: Any, prompt: list[int], variant: Any) -> dict[str, Any]:
    import mlx.core as mx

    from h2o_mlxlm.evaluation.passes import chooser, continued, numbers, sizes

    caches = variant.caches(model)
    choose = chooser(args.temp, args.seed)
    steps = continued(model, caches, mx.array([prompt]), args.max_tokens, choose, args.prefill_step_size)
    tokens = [numbers(next(steps))[0]]
    start = time.perf_counter()  # the prompt has been read
    while tokens[-1] not in tokenizer.eos_token_ids and len(tokens) < args.max_tokens:
        tokens.append(numbers(next(steps))[0])
    seconds = time.perf_counter() - start
    ended = tokens[-1] in tokenizer.eos_token_ids
    return {
        "method": variant.method,
        "name": variant.name,
        "budget": variant.budget or None,
        **sizes(caches, 1),
        "tokens_kept": mean_of(c.tokens_kept if hasattr(c, "tokens_kept") else c.size() for c in caches),
        "tokens_per_second": round((len(tokens) - 1) / seconds, 2) if len(tokens) > 1 else None,
        "text": tokenizer.decode(tokens[:-1] if ended else tokens),
        "tokens": tokens,
    }


def first_difference(full: Sequence[int], tokens: Sequence[int]) -> int | None:
    """Find the first place at which two lists differ, None if they are equal."""
    pairs = zip_longest(full, tokens)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), None)


def header(result: dict[str, Any], with_full: bool = True) -> str:
    """Write the line above a text."""
    speed = result["tokens_per_second"]
    parts = [
        result["name"],
        f"kept {result['tokens_kept']}",
        f"{result['cache_bytes'] / 1e6:.2f} MB",
        f"{speed:.1f} tokens/s" if speed is not None else "- tokens/s",
    ]
    if with_full:
        at = result["differs_at"]
        parts.append(f"differs at {'none' if at is None else at}")
    return ", ".join(parts)


def layout(parts: Sequence[tuple[str, str]], width: int) -> str:
    """Set headers and texts side by side if two or three fit into the width, else one below the other.

    Args:
        parts: Header and text of each.
        width: Columns of the terminal, 0 if it is none.
    """
    each = (width - len(GAP) * (len(parts) - 1)) // len(parts)
    if len(parts) not in (2, 3) or each < NARROWEST:
        return "\n\n".join(f"== {head}\n{text}" for head, text in parts)
    heads = [textwrap.wrap(head, each) for head, _ in parts]
    tallest = max(map(len, heads))
    columns = [
        [*head, *[""] * (tallest - len(head)), "-" * each, *_wrapped(text, each)]
        for head, (_, text) in zip(heads, parts, strict=True)
    ]
    lines = zip_longest(*columns, fillvalue="")
    return "\n".join(GAP.join(cell.ljust(each) for cell in line).rstrip() for line in lines)


def _wrapped(text: str, width: int) -> list[str]:
    return [line for paragraph in text.splitlines() for line in textwrap.wrap(paragraph, width) or [""]]
