"""Prompt caches in files: scores, positions, counts and configuration, for one model alone.

A file is untrusted. The model that is given makes the caches; the file chooses no class, no model and no
tokenizer, and what it holds must be what that model's caches can hold.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from h2o_core import H2OConfig
from h2o_core.config import MOST_TOKENS
from h2o_mlxlm.cache import H2OKVCache, parts_of, share
from h2o_mlxlm.checks import Inputs, is_whole
from h2o_mlxlm.identity import model_identity
from h2o_mlxlm.integration import bounded_layers, make_prompt_cache
from h2o_mlxlm.safetensors_file import read_arrays, write_arrays
from h2o_mlxlm.saved import check_layers, check_leaf, refuse
from h2o_mlxlm.snapshot import FORMAT, config_of, parsed
from h2o_mlxlm.split import SplitH2OKVCache
from h2o_mlxlm.storage import storage_of

NAME = "h2o_mlxlm"
"""Of the one entry in a file's metadata, a JSON object."""

SAVED = (H2OKVCache, SplitH2OKVCache, KVCache, RotatingKVCache, ArraysCache)
"""Caches that a file can hold: those whose state is checked."""

Heads = list[list[int]] | None
"""The budget of each head of each H2O cache, or of none: each layer's heads have one."""


def save_prompt_cache(
    file_name: str | Path, cache: Sequence[Any], model: nn.Module, metadata: Mapping[str, str] | None = None
) -> None:
    """Save the caches of a model, whole or not at all.

    As ``mlx_lm.models.cache.save_prompt_cache``, but for the model, of which a hash goes into the file.

    Args:
        file_name: The file, as it will be called.
        cache: What ``make_prompt_cache`` made, between two calls of the model.
        model: The model that filled it.
        metadata: Texts to go with it, for whoever loads it.

    Raises:
        TypeError: ``metadata`` are not texts.
        ValueError: These are not this model's caches, or some can't be saved.
        OSError: The file can't be written.
    """
    texts = dict(metadata or {})
    if not _are_texts(texts):
        raise TypeError(f"metadata must be names and texts, got {metadata!r}")
    _check_kinds(cache)
    configs, heads, storage = _settings_of_all(cache)
    classes = [type(c).__name__ for c in cache]
    leaves = dict(tree_flatten([c.state for c in cache]))
    # What could not be loaded is not saved.
    inputs = [c.inputs for c in cache if isinstance(c, H2OKVCache)] if configs[0].scorer.inputs else None
    _caches_of(model, configs, heads, storage, classes, leaves, "auto", inputs)
    arrays = {name: x for name, x in leaves.items() if isinstance(x, mx.array)}
    about = {
        "format": FORMAT,
        "model": model_identity(model),
        "configs": [asdict(config) for config in configs],
        "heads": heads,
        "storage": storage,
        "classes": classes,
        "scalars": {name: x for name, x in leaves.items() if name not in arrays},
        "metadata": texts,
    }
    write_arrays(Path(file_name), arrays, {NAME: json.dumps(about)})


def load_prompt_cache(
    file_name: str | Path,
    model: nn.Module,
    return_metadata: bool = False,
    backend: str = "auto",
    inputs: Inputs | None = None,
) -> Any:
    """Load the caches that ``save_prompt_cache`` saved, for the same model.

    Generation goes on as it would have without: configurations come from the file, with everything else.

    Args:
        file_name: The file. It may come from anywhere.
        model: The model that filled the caches, or an equal one.
        return_metadata: Whether to return the metadata as well.
        backend: See ``make_prompt_cache``.
        inputs: See ``make_prompt_cache``: what the caches were made with, which no file holds.

    Returns:
        The list that ``prompt_cache=`` takes; with ``return_metadata`` also the metadata, a dict of texts.

    Raises:
        OSError: There is no such file.
        ValueError: It is no saved prompt cache, it is damaged, or it belongs to another model.
    """
    try:
        cache, metadata = _loaded(Path(file_name), model, backend, inputs)
    except ValueError as error:
        raise ValueError(f"{file_name} is no prompt cache of this model: {error}") from error
    return (cache, metadata) if return_metadata else cache


def _loaded(path: Path, model: nn.Module, backend: str, inputs: Inputs | None) -> tuple[list[Any], dict[str, str]]:
    arrays, texts = read_arrays(path)
    if list(texts) != [NAME]:
        refuse("it was not written by h2o_mlxlm's save_prompt_cache; mlx_lm's files are for mlx_lm's load_prompt_cache")
    about = parsed(texts[NAME], ("model", "configs", "heads", "storage", "classes", "scalars", "metadata"))
    scalars, metadata, configs = about["scalars"], about["metadata"], about["configs"]
    if about["model"] != (own := model_identity(model)):
        refuse(f"it was saved with model {about['model']!r:.40}, and this one is {own!r}: load the one that filled it")
    if not _are_texts(metadata) or not isinstance(scalars, dict) or not scalars.keys().isdisjoint(arrays):
        refuse("its metadata or scalars are not what is saved")
    if not isinstance(configs, list) or not configs:
        refuse("its configurations are no list with one for each layer")
    configs, storage, leaves = [config_of(c) for c in configs], storage_of(about["storage"]), scalars | arrays
    heads = _heads_of(about["heads"])
    return _caches_of(model, configs, heads, storage, about["classes"], leaves, backend, inputs), metadata


def _heads_of(values: Any) -> Heads:
    """Read the budgets of heads; what they may be, ``make_prompt_cache`` knows."""
    if values is None:
        return None
    if not isinstance(values, list) or not all(isinstance(layer, list) and layer for layer in values):
        refuse("its budgets of heads are no list with one for each layer")
    if not all(is_whole(budget, 1, MOST_TOKENS) for layer in values for budget in layer):
        refuse(f"its budgets of heads must be whole numbers from 1 to {MOST_TOKENS}")
    return values


def _settings_of_all(cache: Sequence[Any]) -> tuple[list[H2OConfig], Heads, dict[str, Any]]:
    """Each layer's configuration, the budgets of heads if they differ, and how all of them store rows."""
    ours = [c for c in cache if isinstance(c, (H2OKVCache, SplitH2OKVCache))]
    if not ours or any(c.storage != ours[0].storage for c in ours):
        n = len({str(c.storage) for c in ours})
        raise ValueError(
            f"a file holds H2O caches that store rows in one way, got {n} ways in {len(ours)} of them: make all of "
            "them with one make_prompt_cache(model, config)"
        )
    split = [c.budgets for c in ours if isinstance(c, SplitH2OKVCache)]
    if split and len(split) < len(ours):
        raise ValueError("a file holds H2O caches of one kind, got both kinds: make them with one make_prompt_cache")
    return [c.config for c in ours], split or None, storage_of(ours[0].storage)


def _check_kinds(cache: Sequence[Any]) -> None:
    others = sorted({type(c).__name__ for c in cache if type(c) not in SAVED})
    if others:
        raise ValueError(
            f"a file of caches holds {', '.join(c.__name__ for c in SAVED)}, got {', '.join(others)}, whose state "
            "nobody checks: take a sequence out of mlx_lm's batch with extract and save it by itself, and make ours "
            'with other heads than "adaptive"'
        )


def _caches_of(
    model: nn.Module,
    configs: Sequence[H2OConfig],
    heads: Heads,
    storage: Mapping[str, Any],
    classes: Any,
    leaves: Mapping[str, Any],
    backend: str,
    inputs: Inputs | None,
) -> list[Any]:
    """Make this model's caches from the leaves of their states.

    Args:
        model: The model.
        configs: One for each H2O cache.
        heads: Budgets of each one's heads, where they differ.
        storage: How they store rows, as ``make_prompt_cache`` takes it.
        classes: Names of the caches' classes.
        leaves: Arrays, whole numbers, texts and None by their names in the flat list of states.
        backend: Whose functions they use.
        inputs: Of the scorer.

    Raises:
        ValueError: They are not the states that this model's caches can have.
    """
    if len(configs) != (own := bounded_layers(model)):
        refuse(f"it has {len(configs)} H2O caches, and this model has {own}")
    how: dict[str, Any] = {"partial": True, "backend": backend, "inputs": inputs, **storage}
    # Heads divide one budget.
    config = configs[0] if heads and len(set(configs)) == 1 else configs
    fresh, probe = (make_prompt_cache(model, config, heads=heads or "equal", **how) for _ in range(2))
    _check_kinds(fresh)
    if classes != [type(c).__name__ for c in fresh]:
        refuse(f"its caches are {classes!r:.200}, and this model has {len(fresh)}: {type(fresh[0]).__name__}, ...")
    # Never evaluated: it tells the shapes and dtypes of the model's keys and values.
    model(mx.zeros((1, 2), mx.int32), cache=probe)
    for filled in (probe, fresh):
        like = dict(tree_flatten([c.state for c in filled]))
        if like.keys() == leaves.keys():
            break
    else:
        refuse("its arrays are not those of this model's caches")
    arrays_only = tuple(f"{i}." for i, c in enumerate(fresh) if isinstance(c, ArraysCache))
    for name, leaf in leaves.items():
        check_leaf(name, leaf, like[name], () if name.startswith(arrays_only) else (2,))
    states = tree_unflatten(list(leaves.items()))
    made = [_filled(c, state) for c, state in zip(fresh, states, strict=True)]
    check_layers(made, fresh)
    share(made)
    return made


def _filled(fresh: Any, state: Any) -> Any:
    """Make a cache of this state, with the fresh one's back end where it has one."""
    if isinstance(fresh, SplitH2OKVCache):
        if state["about"] != fresh.state["about"]:
            refuse(f"its layer is divided as {state['about']!r:.200}, and this model's is not")
        return fresh.with_caches([_filled(*pair) for pair in zip(parts_of(fresh), state["shares"], strict=True)])
    if not isinstance(fresh, H2OKVCache):
        return type(fresh).from_state(state)
    filled = copy.copy(fresh)
    filled.state = state
    return filled


def _are_texts(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(x, str) for item in values.items() for x in item)
