"""What stands behind ``h2o-mlxlm server``: mlx_lm's server, its models with H2O caches."""

import argparse
from concurrent.futures import Future
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache
from mlx_lm.server import ModelProvider, ResponseGenerator

from h2o_mlxlm.cli import flags
from h2o_mlxlm.cli.loading import in_one_line, options_for
from h2o_mlxlm.integration import install
from h2o_mlxlm.models import find, prepare


def start(args: argparse.Namespace) -> "Responses":
    """Load the model and begin to take requests.

    Args:
        args: The flags of ``h2o-mlxlm server``.

    Returns:
        A ``Responses``, whose thread runs until its ``stop_and_join``.

    Raises:
        FileNotFoundError: No model is named and none is installed.
        ValueError: The model can't be loaded, or can't have these caches, or a setting is not for a server.
    """
    if args.rewind:
        # mlx_lm's store of prompts takes back any number of tokens where it can take back some.
        raise ValueError(f"--rewind is not for a server, got {args.rewind}: leave it out")
    if args.positions == "auto":
        # A cache would raise, which ends the thread that answers everyone.
        raise ValueError(
            "--positions auto is not for a server: a long request late in a conversation could go past the trained "
            "length in one call; use --positions rolling, or original"
        )
    if args.model is None:
        args.model = find(None)  # by name, so that it is listed
    provider = Provider(args)
    responses = Responses(provider, PromptCache(args.prompt_cache_size))
    try:
        provider.ready.result()
    except BaseException:
        responses.stop_and_join()
        raise
    return responses


class Responses(ResponseGenerator):  # type: ignore[misc]
    """mlx_lm's thread that answers, which ends cleanly."""

    def _run_generate(self) -> None:
        try:
            super()._run_generate()
        finally:
            # mlx would end its own threads after this one has been joined, and a process that exits then is aborted.
            mx.clear_streams()


class Provider(ModelProvider):  # type: ignore[misc]
    """Models by name, one at a time, each with H2O caches for all that it generates."""

    def __init__(self, args: argparse.Namespace) -> None:
        # Rows are quantised by our caches, from the first token on, not by mlx_lm later.
        super().__init__(argparse.Namespace(**(vars(args) | {"kv_bits": None})))
        self.flags = args
        if self.is_distributed:
            raise ValueError("h2o-mlxlm server runs in one process, got several: start it without mlx.launch")
        self.ready: Future[None] = Future()

    def load_default(self) -> None:
        """Load the model that the server was started with, in the thread that will use it, and say how that went."""
        try:
            self.load("default_model", None, "default_model")
        except Exception as error:
            self.ready.set_exception(error)
        else:
            self.ready.set_result(None)

    def _load(self, model_path: str, adapter_path: str | None = None, draft_model_path: Any = None) -> None:
        if draft_model_path is not None:
            raise ValueError(
                f"draft_model={draft_model_path!r} can't be used with an H2O cache: {flags.REFUSED['--draft-model']}"
            )
        try:
            with in_one_line(model_path):
                super()._load(find(model_path), adapter_path)
                prepare(self.model)
                install(self.model, **options_for(self.flags, self.model))
        except ValueError:
            # Left in place, it would answer the next request with a cache that is not ours.
            self.reset()
            raise
        self.model_key = (model_path, adapter_path, None)


class PromptCache(LRUPromptCache):  # type: ignore[misc]
    """Caches of earlier requests to go on from.

    A cache of ours can't be trimmed, so mlx_lm takes the longest that holds nothing but a beginning of the
    prompt. It may hold all of the prompt; mlx_lm would then have no token to feed and its thread would end.
    """

    def fetch_nearest_cache(self, model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]]:
        """Find a copy of the nearest cache, and the tokens that it lacks: one at least."""
        caches, rest = super().fetch_nearest_cache(model, tokens[:-1])
        return caches, [*rest, *tokens[-1:]]
