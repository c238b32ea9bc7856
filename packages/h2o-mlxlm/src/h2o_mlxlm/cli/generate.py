"""``h2o-mlxlm generate``: mlx_lm.generate with a bounded cache."""

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

from h2o_core import H2OConfig
from h2o_core.config import MOST_TOKENS
from h2o_mlxlm.cli import flags
from h2o_mlxlm.cli.loading import loaded

_INFINITY = float("inf")
_BIG = 2**31 - 1


def add_to(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("generate", help="Generate text", description=__doc__)
    add = parser.add_argument
    add("--model", help="Hub id, folder or .gguf file; the installed small model if not given")
    add("--trust-remote-code", action="store_true", help="Run code that the model brings")
    add("--adapter-path", help="Folder of trained adapter weights and their config")
    add("--extra-eos-token", nargs="+", default=(), help="More tokens that end the text")
    add("--system-prompt", help="System message for the chat template")
    add("--prompt", "-p", default="hello", help="Message to the model ('-' reads standard input)")
    add("--prefill-response", help="Beginning of the answer")
    add(
        "--max-tokens",
        "-m",
        type=flags.number(1, _BIG, int),
        default=100,
        help="Tokens to generate (%(default)s)",
    )
    add("--temp", type=flags.number(0, _INFINITY), default=0.0, help="Sampling temperature (%(default)s)")
    add("--top-p", type=flags.number(0, 1), default=1.0, help="Sampling top-p (%(default)s)")
    add("--min-p", type=flags.number(0, 1), default=0.0, help="Sampling min-p (%(default)s)")
    add("--top-k", type=flags.number(0, _BIG, int), default=0, help="Sampling top-k (%(default)s)")
    add("--xtc-probability", type=flags.number(0, 1), default=0.0, help="XTC: probability (%(default)s)")
    add("--xtc-threshold", type=flags.number(0, 0.5), default=0.1, help="XTC: threshold (%(default)s)")
    add(
        "--min-tokens-to-keep",
        type=flags.number(1, _BIG, int),
        default=1,
        help="Fewest tokens of min-p (%(default)s)",
    )
    add("--seed", type=flags.number(0, 2**64 - 1, int), help="Seed of the random numbers")
    add("--ignore-chat-template", action="store_true", help="Use the prompt as it is")
    add("--chat-template-config", type=flags.json_object, help="JSON object for the chat template")
    add("--verbose", type=flags.str2bool, default=True, help="False prints the text alone (True)")
    add(
        "--prefill-step-size",
        type=flags.number(1, _BIG, int),
        default=2048,
        help="Prompt tokens a call (%(default)s)",
    )
    add("--json", action="store_true", help="Print one JSON object and nothing else")
    flags.add_cache_flags(parser)
    flags.add_refused(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate text as the flags ask."""
    if not isinstance(args.budget, float):
        # Before the model is loaded, for that takes time.
        flags.config_from(args, args.budget)
    how = flags.caches_from(args)
    text = _prompt_text(args)
    args.verbose = args.verbose and not args.json
    model, tokenizer = loaded(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        trust_remote_code=args.trust_remote_code,
    )
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    tokens = args.budget if isinstance(args.budget, int) else tokens_in(model, args.budget, how)
    config = flags.config_from(args, tokens)
    prompt = _encode(args, tokenizer, text)
    report = _generate(args, model, tokenizer, prompt, config, how)
    if args.json:
        print(json.dumps(report))
    elif not args.verbose:
        print(report["text"])
    return 0


def tokens_in(model: Any, n_bytes: float, how: dict[str, Any]) -> int:
    """Find the largest budget whose caches, made in this way, fit into so many bytes, the empty slot included.

    Raises:
        ValueError: Not one token fits, or what a token takes is not known.
    """
    if how.get("kv_quantizer", "per_token") != "per_token":
        raise ValueError(
            f"--budget in bytes needs rows of one size, and --kv-quantizer {how['kv_quantizer']} keeps blocks with "
            "holes: give --budget in tokens"
        )
    import mlx.core as mx

    from h2o_mlxlm.cache import H2OKVCache
    from h2o_mlxlm.integration import make_prompt_cache

    # A prompt takes one slot a token: two lengths show a slot's size and what comes on top of the slots.
    sizes = []
    for n in (2, 3):
        caches = make_prompt_cache(model, H2OConfig(budget=8, n_sink=0, grace=0, queries="key"), **how)
        mx.eval(model(mx.zeros((1, n), mx.int32), cache=caches))
        sizes.append(sum(c.nbytes for c in caches if isinstance(c, H2OKVCache)))
    slot = sizes[1] - sizes[0]
    fixed = sizes[0] - 2 * slot
    tokens = int((min(n_bytes, MOST_TOKENS * slot) - fixed) // slot) - 1
    if tokens < 1:
        raise ValueError(f"--budget: {n_bytes:.0f} bytes hold no token, one takes {2 * slot + fixed} bytes here")
    return tokens


def _prompt_text(args: argparse.Namespace) -> str:
    text = args.prompt.replace("\\n", "\n").replace("\\t", "\t")
    text = sys.stdin.read() if text == "-" else text
    if not text.strip():
        raise ValueError("the prompt is empty: pass --prompt TEXT, or '-' and text on standard input")
    return str(text)


def _encode(args: argparse.Namespace, tokenizer: Any, text: str) -> list[int]:
    """The prompt as tokens, in the chat template unless told otherwise, as mlx_lm.generate does."""
    templated = not args.ignore_chat_template and tokenizer.has_chat_template
    if not templated and (args.system_prompt is not None or args.prefill_response is not None):
        raise ValueError("--system-prompt and --prefill-response need a chat template, and none is used")
    if templated:
        messages = [{"role": "system", "content": args.system_prompt}] if args.system_prompt is not None else []
        messages.append({"role": "user", "content": text})
        begun = args.prefill_response is not None
        if begun:
            messages.append({"role": "assistant", "content": args.prefill_response})
        try:
            text = tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                continue_final_message=begun,
                add_generation_prompt=not begun,
                **(args.chat_template_config or {}),
            )
        except Exception as error:
            # A template is the model's own code, and refuses messages with errors of any kind.
            raise ValueError(f"the model's chat template refuses these messages: {error}") from error
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not text in UTF-8: {error}") from error
    return list(tokenizer.encode(text, add_special_tokens=not templated))


def _generate(
    args: argparse.Namespace,
    model: Any,
    tokenizer: Any,
    prompt: list[int],
    config: H2OConfig,
    how: dict[str, Any],
) -> dict[str, Any]:
    """Stream the text and say what it took."""
    import mlx.core as mx
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    from h2o_mlxlm.cache import H2OKVCache
    from h2o_mlxlm.integration import make_prompt_cache

    if args.seed is not None:
        mx.random.seed(args.seed)
    sampler = make_sampler(
        args.temp,
        args.top_p,
        args.min_p,
        args.min_tokens_to_keep,
        top_k=args.top_k,
        xtc_probability=args.xtc_probability,
        xtc_threshold=args.xtc_threshold,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
    )
    caches = make_prompt_cache(model, config, **how)
    pieces: list[str] = []
    response: Any = None
    with _Progress(len(prompt), show=args.verbose and len(prompt) > args.prefill_step_size) as progress:
        for response in stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=args.max_tokens,
            sampler=sampler,
            prefill_step_size=args.prefill_step_size,
            prompt_cache=caches,
            prompt_progress_callback=progress,
        ):
            pieces.append(response.text)
            if args.verbose:
                print(response.text, end="", flush=True)
    ours = [c for c in caches if isinstance(c, H2OKVCache)]
    report = {
        "text": "".join(pieces),
        "prompt_tokens": len(prompt),
        "generated_tokens": response.generation_tokens,
        "kept_tokens": ours[0].tokens_kept,
        "evictions": ours[0].evictions,
        "cache_bytes": sum(c.nbytes for c in caches),
        "full_cache_bytes": sum(c.full_bytes for c in ours),
        "backend": ours[0].backend.name,
        "kv_bits": args.kv_bits,
        "kv_quantizer": args.kv_quantizer,
        "config": asdict(config),
    }
    if args.verbose:
        print(f"\n{_summary(report, response)}")
    return report


def _summary(report: dict[str, Any], response: Any) -> str:
    return (
        f"prompt {report['prompt_tokens']} tokens at {response.prompt_tps:.1f} per second, "
        f"generated {report['generated_tokens']} at {response.generation_tps:.1f}; "
        f"kept {report['kept_tokens']} per head, evicted {report['evictions']}; "
        f"cache {report['cache_bytes'] / 1e6:.2f} MB, full cache {report['full_cache_bytes'] / 1e6:.2f} MB"
    )


class _Progress:
    """A bar on standard error while a long prompt is read."""

    def __init__(self, total: int, show: bool) -> None:
        from tqdm import tqdm

        self._bar = tqdm(total=total, desc="prompt", unit="token", disable=not show, leave=False)

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        self._bar.update(done - self._bar.n)
        if done >= total:
            self._bar.close()
