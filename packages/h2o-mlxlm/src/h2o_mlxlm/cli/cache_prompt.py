"""``h2o-mlxlm cache-prompt``: mlx_lm.cache_prompt with a bounded cache, for ``generate --prompt-cache-file``."""

import argparse
import json
from pathlib import Path
from typing import Any

from h2o_mlxlm.cli import flags
from h2o_mlxlm.cli.loading import loaded, mean_of, options_for
from h2o_mlxlm.cli.prompt import Progress, beginning, prompt_text

STEP = 2048
"""Most tokens a call, as in mlx_lm."""


def add_to(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("cache-prompt", help="Read a prompt once, for later", description=__doc__)
    add = parser.add_argument
    add("--model", help="Hub id, folder or .gguf file; the installed small model if not given")
    add("--adapter-path", help="Folder of trained adapter weights and their config")
    add("--trust-remote-code", action="store_true", help="Run code that the model brings")
    add("--eos-token", help="The tokenizer's end-of-text token")
    add("--prompt-cache-file", required=True, help="File to save the caches in")
    add("--prompt", required=True, help="Beginning of the message ('-' reads standard input)")
    flags.add_cache_flags(parser)
    flags.add_refused(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the prompt and save the caches."""
    path = Path(args.prompt_cache_file)
    # Before the model is loaded, for that takes time.
    if not path.parent.is_dir():
        raise FileNotFoundError(f"--prompt-cache-file: there is no folder {path.parent}")
    flags.check_cache_flags(args)
    flags.check_no_inputs(args)
    if args.budget_shape == "adaptive":
        raise ValueError("--budget-shape adaptive can't be saved: its heads change their budgets; use another one")
    _check_storage(args)
    text = prompt_text(args.prompt)
    settings = {"trust_remote_code": args.trust_remote_code}
    settings |= {} if args.eos_token is None else {"eos_token": args.eos_token}
    model, tokenizer = loaded(
        args.model,
        adapter_path=args.adapter_path,
        tokenizer_config=settings,
        trust_remote_code=args.trust_remote_code,
    )
    from h2o_mlxlm.attention import OURS
    from h2o_mlxlm.integration import make_prompt_cache
    from h2o_mlxlm.persistence import save_prompt_cache

    caches = make_prompt_cache(model, **options_for(args, model))
    prompt = beginning(tokenizer, text)
    _read(model, caches, prompt)
    metadata = {"model": args.model or "", "tokenizer_config": json.dumps(settings)}
    save_prompt_cache(path, caches, model, metadata)
    ours = [c for c in caches if isinstance(c, OURS)]
    kept, gone = mean_of(c.tokens_kept for c in ours), mean_of(c.evictions for c in ours)
    print(
        f"prompt {len(prompt)} tokens; kept {kept} per head, evicted {gone}; "
        f"{path} has {path.stat().st_size / 1e6:.2f} MB"
    )
    return 0


def _check_storage(args: argparse.Namespace) -> None:
    from h2o_mlxlm.storage import storage_of

    storage_of({name: getattr(args, name) for name in flags.STORAGE})


def _read(model: Any, caches: list[Any], prompt: list[int]) -> None:
    """Feed all tokens in equal calls: no call has one token alone, which would end the holding of a prompt."""
    import mlx.core as mx

    n = len(prompt)
    calls = -(-n // STEP)
    with Progress(n, show=calls > 1) as progress:
        for i in range(calls):
            start, end = n * i // calls, n * (i + 1) // calls
            model(mx.array([prompt[start:end]]), cache=caches)
            mx.eval([c.state for c in caches])
            mx.clear_cache()
            progress(end, n)
