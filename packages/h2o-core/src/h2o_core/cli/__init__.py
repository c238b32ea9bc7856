"""The command line: ``h2o-sim COMMAND``, what a cache would keep of recorded attention, without a model."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from h2o_core.cli import commands, inputs, texts
from h2o_core.config import H2OConfig

__all__ = ["main"]


class Parser(argparse.ArgumentParser):
    """An argument parser that says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """Print one line and exit with 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments; None for the process's own.

    Returns:
        0; 2 after one line on standard error if the input was bad; 130 if interrupted.
    """
    parser = Parser(prog="h2o-sim", description="Replay recorded attention and see what a cache would keep.")
    added = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    for name, run, what, *flags in (
        ("run", commands.run, "Replay attention through one cache", inputs.add_attention, inputs.add_config, _add_run),
        ("compare", commands.compare, "Replay it through several", inputs.add_attention, _add_compare),
        ("generate", commands.generate, "Make attention up, and write it", inputs.add_made, _add_generate),
    ):
        command = added.add_parser(name, help=what, description=what + ".")
        for add_to in flags:
            add_to(command)
        command.add_argument("--json", action="store_true", help="Print one JSON object and nothing else")
        command.set_defaults(run=run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except (ValueError, TypeError, OSError) as error:
        print(f"h2o-sim: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FILE.safetensors", help="Write kept, retained and evicted of every step")


def _add_compare(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    size = H2OConfig().budget
    add("--budget", type=int, default=size, help="Tokens kept, where a configuration does not say (%(default)s)")
    add(
        "--config",
        action="append",
        metavar="'[NAME] FIELD=VALUE …'",
        help=f"Fields of H2OConfig such as 'grace=16 decay=1.0', over those of {texts.NAMES}, or the defaults, "
        "or a scorer and its parameters such as 'snapkv window=16'; "
        "once for each cache (all of these)",
    )
    add("--scorers", action="store_true", help="Every scorer that the trace has enough for; the others are named")
    add("--plot", metavar="FILE.png", help="Draw mass retained and positions kept (needs matplotlib)")


def _add_generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=inputs.KINDS, help="What is planted")
    parser.add_argument("--out", metavar="FILE.safetensors", required=True, help="The trace")
