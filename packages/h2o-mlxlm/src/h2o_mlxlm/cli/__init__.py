"""The command line: ``h2o-mlxlm COMMAND``, with mlx_lm's flags and ours."""

import logging
import sys
from collections.abc import Sequence

from h2o_mlxlm.cli import bench, cache_prompt, calibrate, chat, compare, evaluate, generate, server, trace
from h2o_mlxlm.cli.flags import Parser

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments; None for the process's own.

    Returns:
        0; 2 after one line on standard error if the input was bad; 130 if interrupted.
    """
    parser = Parser(prog="h2o-mlxlm", description="Generate text with a bounded, heavy-hitter KV cache.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    generate.add_to(commands)
    cache_prompt.add_to(commands)
    chat.add_to(commands)
    server.add_to(commands)
    bench.add_to(commands)
    evaluate.add_to(commands)
    calibrate.add_to(commands)
    compare.add_to(commands)
    trace.add_to(commands)
    args = parser.parse_args(argv)
    logging.basicConfig(
        format=getattr(args, "log_format", "%(message)s"),
        level=getattr(args, "log_level", "WARNING"),
        stream=sys.stderr,
    )
    logging.getLogger("h2o_mlxlm").setLevel(logging.INFO if getattr(args, "verbose", True) else logging.WARNING)
    try:
        return int(args.run(args))
    except (ValueError, OSError) as error:
        print(f"h2o-mlxlm: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
