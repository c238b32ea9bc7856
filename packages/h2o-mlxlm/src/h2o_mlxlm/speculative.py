"""Speculative decoding by mlx_lm: what must hold of our caches before it starts.

mlx_lm asks the model's caches alone, once, and never for how many tokens. A draft model's cache that can't be
trimmed goes on with rejected tokens in it, and one that can take back too few would fail in the middle of the text.
"""

import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import wraps
from typing import Any

import mlx_lm.generate  # noqa: F401
from mlx_lm.models.cache import make_prompt_cache

from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.split import SplitH2OKVCache

_MODULE: Any = sys.modules["mlx_lm.generate"]  # the package has a function of this name, too
_plain = _MODULE.speculative_generate_step


def check_caches(caches: Iterable[object], num_draft_tokens: int) -> None:
    """See that every H2O cache can take back as many tokens as are drafted at a time.

    A model sees the last token and ``num_draft_tokens`` drafted ones in one call, and all of those may be rejected.

    Raises:
        ValueError: One has a smaller ``rewind``.
    """
    for cache in caches:
        if isinstance(cache, H2OKVCache | SplitH2OKVCache) and cache.config.rewind < num_draft_tokens:
            raise ValueError(
                "speculative decoding takes back up to num_draft_tokens from the caches of the model and of the draft "
                f"model, got num_draft_tokens={num_draft_tokens} and a cache with rewind={cache.config.rewind}: make "
                f"the caches of both with H2OConfig(rewind={num_draft_tokens})"
            )


@wraps(_plain)
def speculative_generate_step(*args: Any, **kwargs: Any) -> Iterator[Any]:
    """mlx_lm's own, once ``check_caches`` has passed."""
    given = inspect.signature(_plain).bind(*args, **kwargs)
    given.apply_defaults()
    caches, models = given.arguments["prompt_cache"], ("model", "draft_model")
    if caches is None:
        caches = [cache for name in models for cache in make_prompt_cache(given.arguments[name])]
    check_caches(caches, given.arguments["num_draft_tokens"])
    steps: Iterator[Any] = _plain(*args, **kwargs)
    return steps


def place_check() -> None:
    """Put the check before mlx_lm's function, once and for good; it concerns H2O caches alone."""
    _MODULE.speculative_generate_step = speculative_generate_step
