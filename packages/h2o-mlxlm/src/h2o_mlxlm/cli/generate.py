"""``h2o-mlxlm generate``: mlx_lm.generate with a bounded cache."""

import argparse
import json
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

from h2o_core import H2OConfig
from h2o_mlxlm.budgets import RAGGED
from h2o_mlxlm.cli import drafting, flags
from h2o_mlxlm.cli.loading import cache_options, config_for, loaded, mean_of, tokens_of
from h2o_mlxlm.cli.prompt import Progress, prompt_text, rest, whole

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
    add("--prompt-cache-file", help="File of cache-prompt: the prompt goes on where that one ended")
    add("--json", action="store_true", help="Print one JSON object and nothing else")
    flags.add_cache_flags(parser)
    drafting.add_flags(parser)
    flags.add_refused(parser, but=drafting.FLAGS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate text as the flags ask."""
    # Before the model is loaded, for that takes time.
    drafting.check(args)
    if args.prompt_cache_file is None:
        flags.check_cache_flags(args)
    else:
        _check_file(args)
    text = prompt_text(args.prompt)
    args.verbose = args.verbose and not args.json
    model, tokenizer = loaded(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        trust_remote_code=args.trust_remote_code,
    )
    for token in args.extra_eos_token:
        tokenizer.add_eos_token(token)
    draft_model = drafting.load(args, tokenizer)
    prompt = (whole if args.prompt_cache_file is None else rest)(args, tokenizer, text)
    caches = _caches(args, model, draft_model, prompt)
    report = _generate(args, model, draft_model, tokenizer, prompt, caches)
    if args.json:
        print(json.dumps(report))
    elif not args.verbose:
        print(report["text"])
    return 0


def _check_file(args: argparse.Namespace) -> None:
    if not Path(args.prompt_cache_file).is_file():
        raise FileNotFoundError(f"--prompt-cache-file: there is no file {args.prompt_cache_file}")
    if args.system_prompt is not None:
        raise ValueError("--system-prompt can't be used with --prompt-cache-file: what is saved comes before it")
    for flag in getattr(args, "given", {}).values():
        if flag in ("--budget-shape", "--needs"):
            raise ValueError(f"{flag} can't be used with --prompt-cache-file: its caches are as they were saved")
    if args.draft_model is not None:
        raise ValueError("--draft-model can't be used with --prompt-cache-file, which holds no caches of that model")


def _caches(args: argparse.Namespace, model: Any, draft_model: Any, prompt: list[int]) -> list[Any]:
    """Make fresh caches as the flags say, those of the model first, or take those of ``--prompt-cache-file``."""
    from h2o_mlxlm.attention import OURS
    from h2o_mlxlm.inputs import inputs_from
    from h2o_mlxlm.integration import make_prompt_cache
    from h2o_mlxlm.persistence import load_prompt_cache

    if args.prompt_cache_file is None:
        config, models = config_for(args, model, draft_model), [m for m in (model, draft_model) if m is not None]
        made = [
            make_prompt_cache(m, **cache_options(args, m, config), inputs=inputs_from(m, prompt, config))
            for m in models
        ]
        return list(chain(*made))
    caches: list[Any] = load_prompt_cache(args.prompt_cache_file, model, backend=args.backend)
    ours = [c for c in caches if isinstance(c, OURS)]
    if not isinstance(ours[0].offset, int) or ours[0].sequences > 1:
        raise ValueError(f"{args.prompt_cache_file} holds a batch, and one prompt goes on: save a sequence by itself")
    fields = [vars(c.config) | c.storage for c in ours]
    uneven = {name: "one for each layer" for name, x in fields[0].items() if any(f[name] != x for f in fields)}
    flags.check_given(args, fields[0] | uneven, tokens_of(args, model))
    return caches


def _generate(
    args: argparse.Namespace, model: Any, draft_model: Any, tokenizer: Any, prompt: list[int], caches: list[Any]
) -> dict[str, Any]:
    """Stream the text and say what it took."""
    import mlx.core as mx
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    from h2o_mlxlm.attention import OURS

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
    drafts = {} if draft_model is None else {"draft_model": draft_model, "num_draft_tokens": args.num_draft_tokens}
    pieces: list[str] = []
    response: Any = None
    accepted = 0
    # While two models read it, mlx_lm does not say how far they are.
    shown = args.verbose and draft_model is None and len(prompt) > args.prefill_step_size
    with Progress(len(prompt), show=shown) as progress:
        for response in stream_generate(
            model,
            tokenizer,
            prompt,
            max_tokens=args.max_tokens,
            sampler=sampler,
            prefill_step_size=args.prefill_step_size,
            prompt_cache=caches,
            prompt_progress_callback=progress,
            **drafts,
        ):
            pieces.append(response.text)
            accepted += response.from_draft
            if args.verbose:
                print(response.text, end="", flush=True)
    ours = [c for c in caches if isinstance(c, OURS)]
    report = {
        "text": "".join(pieces),
        "prompt_tokens": len(prompt),
        "generated_tokens": response.generation_tokens,
        "accepted_tokens": accepted,
        "kept_tokens": mean_of([c.tokens_kept for c in ours]),
        "evictions": mean_of([c.evictions for c in ours]),
        "cache_bytes": sum(c.nbytes for c in caches),
        "full_cache_bytes": sum(c.full_bytes for c in ours),
        "backend": ours[0].backend.name,
        **{name: getattr(ours[0], "storage", vars(args))[name] for name in ("kv_bits", "kv_quantizer")},
        "config": _config(args, model, draft_model, [c.config for c in ours]),
    }
    if args.verbose:
        print(f"\n{_summary(report, response)}")
    return report


def _config(args: argparse.Namespace, model: Any, draft_model: Any, made: list[H2OConfig]) -> dict[str, Any]:
    """The fields of all layers' configuration; where layers differ, as they were asked for, or a file's mean."""
    if len(set(made)) == 1:
        return asdict(made[0])
    if args.prompt_cache_file is None:
        return asdict(config_for(args, model, draft_model))
    means = {name: fmean(getattr(c, name) for c in made) for name in RAGGED}
    return asdict(made[0]) | {n: round(x) if isinstance(getattr(made[0], n), int) else x for n, x in means.items()}


def _summary(report: dict[str, Any], response: Any) -> str:
    return (
        f"prompt {report['prompt_tokens']} tokens at {response.prompt_tps:.1f} per second, "
        f"generated {report['generated_tokens']} at {response.generation_tps:.1f}, "
        f"{report['accepted_tokens']} of them drafted; "
        f"kept {report['kept_tokens']} per head, evicted {report['evictions']}; "
        f"cache {report['cache_bytes'] / 1e6:.2f} MB, full cache {report['full_cache_bytes'] / 1e6:.2f} MB"
    )
