"""``h2o-mlxlm chat``: mlx_lm.chat on one bounded cache, however long it goes on."""

import argparse
from typing import Any

from h2o_core import H2OConfig
from h2o_mlxlm.cli import flags
from h2o_mlxlm.cli.loading import cache_options, config_for, loaded
from h2o_mlxlm.cli.prompt import in_template

_INFINITY = float("inf")
_COUNT = flags.number(1, 2**31 - 1, int)


def add_to(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("chat", help="Chat, turn after turn", description=__doc__)
    add = parser.add_argument
    add("--model", help="Hub id, folder or .gguf file; the installed small model if not given")
    add("--trust-remote-code", action="store_true", help="Run code that the model brings")
    add("--adapter-path", help="Folder of trained adapter weights and their config")
    add("--temp", type=flags.number(0, _INFINITY), default=0.0, help="Sampling temperature (%(default)s)")
    add("--top-p", type=flags.number(0, 1), default=1.0, help="Sampling top-p (%(default)s)")
    add("--xtc-probability", type=flags.number(0, 1), default=0.0, help="XTC: probability (%(default)s)")
    add("--xtc-threshold", type=flags.number(0, 0.5), default=0.1, help="XTC: threshold (%(default)s)")
    add("--seed", type=flags.number(0, 2**64 - 1, int), default=0, help="Seed of the random numbers (%(default)s)")
    add("--prefill-step-size", type=_COUNT, default=2048, help="Prompt tokens a call (%(default)s)")
    add("--max-tokens", "-m", type=_COUNT, default=256, help="Tokens of an answer, at most (%(default)s)")
    add("--system-prompt", help="System message for the chat template")
    flags.add_cache_flags(parser)
    flags.add_refused(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Talk until the user quits."""
    flags.check_cache_flags(args)
    flags.check_no_inputs(args)
    model, tokenizer = loaded(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config={"trust_remote_code": args.trust_remote_code},
        trust_remote_code=args.trust_remote_code,
    )
    config = config_for(args, model)
    import mlx.core as mx

    from h2o_mlxlm.cli.screen import Screen

    mx.random.seed(args.seed)
    with Screen(args, config) as screen:
        _talk(args, model, tokenizer, config, screen)
    return 0


def _talk(args: argparse.Namespace, model: Any, tokenizer: Any, config: H2OConfig, screen: Any) -> None:
    from h2o_mlxlm.integration import make_prompt_cache

    caches = make_prompt_cache(model, **cache_options(args, model, config))
    while (query := screen.prompt()) != "q":
        if query == "r":
            caches = make_prompt_cache(model, **cache_options(args, model, config))
            screen.say_reset()
        elif query == "h":
            screen.say_help()
        else:
            _answer(args, model, tokenizer, query, caches, screen)
    screen.say_bye()


def _answer(args: argparse.Namespace, model: Any, tokenizer: Any, query: str, caches: list[Any], screen: Any) -> None:
    """Go on from the caches with this message, and show the answer and what is kept after it."""
    from mlx_lm import stream_generate
    from mlx_lm.sample_utils import make_sampler

    system = [] if args.system_prompt is None else [{"role": "system", "content": args.system_prompt}]
    text = in_template(tokenizer, [*system, {"role": "user", "content": query}], add_generation_prompt=True)
    sampler = make_sampler(
        args.temp,
        args.top_p,
        xtc_threshold=args.xtc_threshold,
        xtc_probability=args.xtc_probability,
        xtc_special_tokens=[*tokenizer.encode("\n"), *tokenizer.eos_token_ids],
    )
    response = None
    for response in stream_generate(
        model,
        tokenizer,
        tokenizer.encode(text, add_special_tokens=False),
        max_tokens=args.max_tokens,
        sampler=sampler,
        prompt_cache=caches,
        prefill_step_size=args.prefill_step_size,
    ):
        screen.stream_token(response.text)
    screen.end_turn(response)
    screen.say_kept(caches)
