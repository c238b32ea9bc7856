"""What ``h2o-mlxlm chat`` shows: mlx_lm.chat's screen, and what the cache keeps."""

import argparse
from typing import Any

from mlx_lm.cli_ui import ChatUI, print_chat_help, print_header_panel

from h2o_core import H2OConfig
from h2o_mlxlm.attention import OURS
from h2o_mlxlm.cli.loading import mean_of


class Screen(ChatUI):  # type: ignore[misc]
    """mlx_lm's, with our name, the budget, and a line on the cache after each answer."""

    def __init__(self, args: argparse.Namespace, config: H2OConfig) -> None:
        super().__init__(args)
        self._config = config

    def __enter__(self) -> "Screen":
        config, args = self._config, self._args
        shown = [
            ("model", args.model or "the installed small model"),
            ("adapter", args.adapter_path),
            ("budget", f"{config.budget:,} tokens a head: the first {config.n_sink}, the newest {config.grace}"),
            ("max tokens", f"{args.max_tokens:,}"),
            ("system", args.system_prompt),
        ]
        print_header_panel(self._console, "h2o-mlxlm chat", [(name, str(value)) for name, value in shown if value])
        print_chat_help(self._console)
        return self

    def prompt(self) -> str:
        """Ask for a message; the end of the input quits."""
        try:
            return str(super().prompt())
        except EOFError:
            return "q"

    def say_kept(self, caches: list[Any]) -> None:
        """Say what the caches hold, of one head on average, and in bytes."""
        ours = [c for c in caches if isinstance(c, OURS)]
        held, full = sum(c.nbytes for c in caches), sum(c.full_bytes for c in ours)
        figures = [(c.tokens_kept, c.tokens_seen, c.evictions) for c in ours]
        kept, seen, gone = (mean_of(column) for column in zip(*figures, strict=True))
        self._console.print(
            f"  [ui.muted]kept {kept} of {seen} tokens · evicted {gone} · "
            f"cache {held / 1e6:.2f} MB, full cache {full / 1e6:.2f} MB[/ui.muted]"
        )
