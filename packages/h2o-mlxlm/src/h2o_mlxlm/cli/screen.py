"""What ``h2o-mlxlm chat`` shows: mlx_lm.chat's screen, and what the cache keeps."""

import argparse
from typing import Any

from mlx_lm.cli_ui import ChatUI, print_chat_help, print_header_panel

from h2o_core import H2OConfig
from h2o_mlxlm.cache import H2OKVCache


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
        """Say what the caches hold, of one head of one layer, and in bytes."""
        ours = [c for c in caches if isinstance(c, H2OKVCache)]
        first, held, full = ours[0], sum(c.nbytes for c in caches), sum(c.full_bytes for c in ours)
        self._console.print(
            f"  [ui.muted]kept {first.tokens_kept} of {first.tokens_seen} tokens · evicted {first.evictions} · "
            f"cache {held / 1e6:.2f} MB, full cache {full / 1e6:.2f} MB[/ui.muted]"
        )
