"""``h2o-mlxlm server``: mlx_lm.server with a bounded cache for every request."""

import argparse
from typing import Any

from h2o_mlxlm.cli import flags

_INFINITY = float("inf")
_COUNT = flags.number(1, 2**31 - 1, int)
OWN = ("--use-default-chat-template",)  # refused elsewhere, honoured here


def add_to(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("server", help="Answer requests in the form of OpenAI's", description=__doc__)
    add = parser.add_argument
    add("--model", help="Hub id, folder or .gguf file; the installed small model if not given")
    add("--adapter-path", help="Folder of trained adapter weights and their config")
    add("--host", default="127.0.0.1", help="Host to listen at (%(default)s)")
    add("--port", type=flags.number(0, 65535, int), default=8080, help="Port to listen at (%(default)s)")
    add("--allowed-origins", type=lambda text: text.split(","), default="*", help="Allowed origins (%(default)s)")
    add("--trust-remote-code", action="store_true", help="Run code that the model brings")
    add("--log-level", choices=["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"], default="INFO", help="(%(default)s)")
    add("--chat-template", default="", help="Chat template in place of the tokenizer's own")
    add("--use-default-chat-template", action="store_true", help="Use a template though the tokenizer has none")
    add("--chat-template-args", type=flags.json_object, default="{}", help="JSON object for the chat template")
    _add_answer_flags(parser.add_argument_group("answers, where a request does not say").add_argument)
    _add_batch_flags(parser.add_argument_group("requests that run together").add_argument)
    flags.add_cache_flags(parser)
    flags.add_refused(parser, but=OWN)
    parser.set_defaults(run=run, log_format="%(asctime)s - %(levelname)s - %(message)s")
    # What mlx_lm reads of the flags that are refused.
    parser.set_defaults(num_draft_tokens=3, kv_group_size=64, quantized_kv_start=5000, pipeline=False)


def _add_answer_flags(add: Any) -> None:
    add("--temp", type=flags.number(0, _INFINITY), default=0.0, help="Sampling temperature (%(default)s)")
    add("--top-p", type=flags.number(0, 1), default=1.0, help="Sampling top-p (%(default)s)")
    add("--top-k", type=flags.number(0, 2**31 - 1, int), default=0, help="Sampling top-k (%(default)s)")
    add("--min-p", type=flags.number(0, 1), default=0.0, help="Sampling min-p (%(default)s)")
    add("--max-tokens", type=_COUNT, default=512, help="Tokens to generate (%(default)s)")


def _add_batch_flags(add: Any) -> None:
    add("--decode-concurrency", type=_COUNT, default=32, help="Answers at a time (%(default)s)")
    add("--prompt-concurrency", type=_COUNT, default=8, help="Prompts at a time (%(default)s)")
    add("--prefill-step-size", type=_COUNT, default=2048, help="Prompt tokens a call (%(default)s)")
    add(
        "--prompt-cache-size",
        type=flags.number(0, 2**31 - 1, int),
        default=10,
        help="Caches kept to go on from; a turn of a conversation leaves two (%(default)s)",
    )
    add("--prompt-cache-bytes", type=_size, help="Most bytes of caches, running ones included")


def run(args: argparse.Namespace) -> int:
    """Answer requests until interrupted."""
    flags.check_cache_flags(args)
    flags.check_no_inputs(args)
    from mlx_lm.server import _run_http_server
    from mlx_lm.utils import maybe_set_recommended_wired_limit

    from h2o_mlxlm.cli.serving import start

    maybe_set_recommended_wired_limit()
    responses = start(args)
    try:
        _run_http_server(args.host, args.port, responses)
    finally:
        # Its thread would outlive us.
        responses.stop_and_join()
    return 0


def _size(text: str) -> int:
    """Read bytes such as 2GB, or a number of them."""
    return int(flags.budget(text))
