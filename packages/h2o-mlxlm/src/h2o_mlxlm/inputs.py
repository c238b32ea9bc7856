"""What scorers need of the caller, made with a model: query statistics, filters, a pass that repeats the context.

Each function returns what ``make_prompt_cache(..., inputs=)`` takes: for each layer with an H2O cache, lowest first, a
dict of arrays. The text is read with a full cache and its queries, keys and values are held, of all these layers.
"""

from collections.abc import Callable, Sequence

import mlx.core as mx
import mlx.nn as nn

from h2o_core import H2OConfig, Recording
from h2o_core.evidence import seen
from h2o_core.scorers.expected_attention import statistics_from
from h2o_core.scorers.qfilters import filters_from
from h2o_mlxlm.cache import H2OKVCache
from h2o_mlxlm.integration import make_prompt_cache
from h2o_mlxlm.layers import families, layers_of, name_of, ropes_of
from h2o_mlxlm.recording import record
from h2o_mlxlm.suitability import NO_ROLLING
from h2o_rope import Rotation, derotate, rotate, rotation_of

Given = list[dict[str, mx.array]]


def query_filters(model: nn.Module, tokens: Sequence[int]) -> Given:
    """Estimate ``filters`` for scorer ``"qfilters"``: the direction that a text's queries have in common.

    Args:
        model: A model that ``load`` returned.
        tokens: A text that is typical of what is to come.

    Returns:
        ``filters``, float32 [H, D], of each layer; see ``h2o_core.scorers.qfilters.filters_from``.

    Raises:
        ValueError: There is no token, or a layer's attention can't be recorded.
    """
    return [{"filters": filters_from(seen(r.queries), r.heads or 1)} for r in _recorded(model, tokens)]


def query_statistics(model: nn.Module, tokens: Sequence[int], ahead: int = 512, start: int | None = None) -> Given:
    """Estimate ``query_mean`` and ``query_cov`` for scorer ``"expected_attention"``.

    With μ and Σ the mean and covariance of a text's queries before their rotation, and R the mean of the rotations to
    positions ``start`` … ``start + ahead − 1``,

        mean = scale · R μ,   cov = scale² · R Σ Rᵀ

    Args:
        model: A model that ``load`` returned.
        tokens: A text that is typical of what is to come, such as the prompt.
        ahead: Positions to come that are averaged over, at least 1; 512 as in the paper's program.
        start: The first of them; None is the text's end.

    Returns:
        float32 [Hq, D] and [Hq, D, D], of each layer.

    Raises:
        ValueError: ``ahead`` or ``start`` is out of range, there is no token, a layer's attention can't be recorded, or
            its queries are not just rotated, in a way that can be undone.

    Source:
        Devoto et al., Expected Attention (arXiv 2510.00636), section 3.
    """
    start = len(tokens) if start is None else start
    if ahead < 1 or start < 0:
        raise ValueError(f"ahead must be at least 1 and start at least 0, got ahead={ahead}, start={start}")
    rotations = _rotations(model)
    recorded = _recorded(model, tokens)
    places = mx.arange(start, start + ahead)
    return [_expected(r, rotation, places) for r, rotation in zip(recorded, rotations, strict=True)]


def reconstruction(model: nn.Module, tokens: Sequence[int], cue: Sequence[int] = ()) -> Given:
    """Find ``reconstruction`` for scorer ``"kvzip"``: what the model relies on to say its context again.

    It reads the context, the cue, and the context once more; a token's number is the largest attention that it
    received meanwhile, over the queries of the second reading and the query heads of the KV head. Positions go up to
    2 T and the cue.

    Args:
        model: A model that ``load`` returned.
        tokens: The context, T tokens: what the cache will see first.
        cue: Tokens that ask for a repetition.

    Returns:
        ``reconstruction``, float32 [H, T], of each layer.

    Raises:
        ValueError: There is no token, or a layer's attention can't be recorded.

    Source:
        Kim et al., KVzip (arXiv 2505.23416), section 3. It repeats chunk by chunk after a request in words, a query's
        attention over its chunk and the repetition; here over everything, and the request is the caller's to give.
    """
    n = len(tokens)
    return [{"reconstruction": _reliance(r, n, n + len(cue))} for r in _recorded(model, [*tokens, *cue, *tokens])]


def inputs_from(model: nn.Module, tokens: Sequence[int], config: H2OConfig) -> Given | None:
    """Make what the configuration's scorer needs, from the prompt itself; None if it needs nothing.

    Raises:
        ValueError: See above; or nobody here knows how to make it.
    """
    needed = config.scorer.inputs
    if not needed:
        return None
    makers: dict[frozenset[str], Callable[[], Given]] = {
        frozenset({"filters"}): lambda: query_filters(model, tokens),
        frozenset({"query_mean", "query_cov"}): lambda: query_statistics(
            # Keys that roll stay below the budget, and queries right behind them.
            model,
            tokens,
            start=config.budget if config.positions == "rolling" else None,
        ),
        frozenset({"reconstruction"}): lambda: reconstruction(model, tokens),
    }
    if needed not in makers:
        raise ValueError(
            f"scorer {config.scorer.name!r} needs {', '.join(sorted(needed))}, which can't be made from a prompt here: "
            "give them to make_prompt_cache in inputs"
        )
    return makers[needed]()


def _recorded(model: nn.Module, tokens: Sequence[int]) -> list[Recording]:
    if not tokens:
        raise ValueError("a scorer's inputs are made from a text, got no token")
    return list(record(model, tokens).values())


def _expected(recording: Recording, rotation: Rotation, places: mx.array) -> dict[str, mx.array]:
    queries = seen(recording.queries)
    still = statistics_from(derotate(queries[None], mx.arange(queries.shape[-2]), rotation), recording.scale or 1.0)
    width = queries.shape[-1]
    # Rows of the identity, each at every place: a rotation is linear.
    rows = mx.broadcast_to(mx.eye(width)[None, :, None], (1, width, places.size, width))
    turned = rotate(rows, places, rotation).mean(axis=2)[0]
    found = {"query_mean": still["query_mean"] @ turned, "query_cov": turned.T @ still["query_cov"] @ turned}
    mx.eval(found)
    return found


def _reliance(recording: Recording, n_context: int, first: int) -> mx.array:
    """The largest attention that each of the first ``n_context`` tokens received from token ``first`` on."""
    rows, heads = recording.rows(), recording.heads or 1
    most = mx.zeros((heads, n_context))
    for start in range(first, rows.shape[-1], rows.block):
        p = rows.make(start, min(start + rows.block, rows.shape[-1]))[..., :n_context]
        most = mx.maximum(most, mx.unflatten(p, 0, (heads, -1)).max(axis=(1, 2)))
        mx.eval(most)
    return most


def _rotations(model: nn.Module) -> list[Rotation]:
    """The rotation of each layer's queries.

    Raises:
        ValueError: They are more, or something else, than rotated.
    """
    for family in families(model) & NO_ROLLING.keys():
        raise ValueError(
            f"query_statistics turns queries to positions to come, but {name_of(model)} {NO_ROLLING[family]}: use "
            "another scorer"
        )
    caches = make_prompt_cache(model, H2OConfig(), partial=True)
    layers = zip(layers_of(model, caches), caches, strict=True)
    each = [ropes_of(layer) for layer, cache in layers if isinstance(cache, H2OKVCache)]
    if any(len(ropes) != 1 for ropes in each):
        raise ValueError(
            f"query_statistics needs the one rotary embedding of each layer, found {[len(ropes) for ropes in each]} in "
            f"{name_of(model)}: use another scorer"
        )
    return [rotation_of(ropes[0]) for ropes in each]
