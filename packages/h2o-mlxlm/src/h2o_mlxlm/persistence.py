"""Prompt caches in files: scores, positions, counts and configuration, for one model alone.

A file is untrusted. The model that is given makes the caches; the file chooses no class, no model and no
tokenizer, and what it holds must be what that model's caches can hold.
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache

from h2o_core import H2OConfig
from h2o_mlxlm.cache import H2OKVCache, share
from h2o_mlxlm.checks import Inputs
from h2o_mlxlm.identity import model_identity
from h2o_mlxlm.integration import bounded_layers, make_prompt_cache
from h2o_mlxlm.safetensors_file import read_arrays, write_arrays
from h2o_mlxlm.snapshot import FORMAT, config_of, parsed
from h2o_mlxlm.storage import storage_of
from h2o_rope import Rotation

NAME = "h2o_mlxlm"
"""Of the one entry in a file's metadata, a JSON object."""

SAVED = (H2OKVCache, KVCache, RotatingKVCache, ArraysCache)
"""Caches that a file can hold: those whose state is checked."""


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
    configs, storage = _settings_of_all(cache)
    classes = [type(c).__name__ for c in cache]
    leaves = dict(tree_flatten([c.state for c in cache]))
    # What could not be loaded is not saved.
    inputs = [c.inputs for c in cache if isinstance(c, H2OKVCache)] if configs[0].scorer.inputs else None
    _caches_of(model, configs, storage, classes, leaves, "auto", inputs)
    arrays = {name: x for name, x in leaves.items() if isinstance(x, mx.array)}
    about = {
        "format": FORMAT,
        "model": model_identity(model),
        "configs": [asdict(config) for config in configs],
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
        _refuse(
            "it was not written by h2o_mlxlm's save_prompt_cache; mlx_lm's files are for mlx_lm's load_prompt_cache"
        )
    about = parsed(texts[NAME], ("model", "configs", "storage", "classes", "scalars", "metadata"))
    scalars, metadata, configs = about["scalars"], about["metadata"], about["configs"]
    if about["model"] != (own := model_identity(model)):
        _refuse(f"it was saved with model {about['model']!r:.40}, and this one is {own!r}: load the one that filled it")
    if not _are_texts(metadata) or not isinstance(scalars, dict) or not scalars.keys().isdisjoint(arrays):
        _refuse("its metadata or scalars are not what is saved")
    if not isinstance(configs, list) or not configs:
        _refuse("its configurations are no list with one for each layer")
    configs, storage, leaves = [config_of(c) for c in configs], storage_of(about["storage"]), scalars | arrays
    return _caches_of(model, configs, storage, about["classes"], leaves, backend, inputs), metadata


def _settings_of_all(cache: Sequence[Any]) -> tuple[list[H2OConfig], dict[str, Any]]:
    """Each layer's configuration, and how all of them store rows."""
    ours = [c for c in cache if isinstance(c, H2OKVCache)]
    if not ours or any(c.storage != ours[0].storage for c in ours):
        n = len({str(c.storage) for c in ours})
        raise ValueError(
            f"a file holds H2O caches that store rows in one way, got {n} ways in {len(ours)} of them: make all of "
            "them with one make_prompt_cache(model, config)"
        )
    return [c.config for c in ours], storage_of(ours[0].storage)


def _check_kinds(cache: Sequence[Any]) -> None:
    others = sorted({type(c).__name__ for c in cache if type(c) not in SAVED})
    if others:
        raise ValueError(
            f"a file of caches holds {', '.join(c.__name__ for c in SAVED)}, got {', '.join(others)}, whose state "
            "nobody checks: take a sequence out of mlx_lm's batch with extract and save it by itself, and make ours "
            'with heads="equal"'
        )


def _caches_of(
    model: nn.Module,
    configs: Sequence[H2OConfig],
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
        storage: How they store rows, as ``make_prompt_cache`` takes it.
        classes: Names of the caches' classes.
        leaves: Arrays, whole numbers, texts and None by their names in the flat list of states.
        backend: Whose functions they use.
        inputs: Of the scorer.

    Raises:
        ValueError: They are not the states that this model's caches can have.
    """
    if len(configs) != (own := bounded_layers(model)):
        _refuse(f"it has {len(configs)} H2O caches, and this model has {own}")
    how: dict[str, Any] = {"backend": backend, "inputs": inputs, **storage}
    fresh, probe = (make_prompt_cache(model, configs, partial=True, **how) for _ in range(2))
    _check_kinds(fresh)
    if classes != [type(c).__name__ for c in fresh]:
        _refuse(f"its caches are {classes!r:.200}, and this model has {len(fresh)}: {type(fresh[0]).__name__}, ...")
    # Never evaluated: it tells the shapes and dtypes of the model's keys and values.
    model(mx.zeros((1, 2), mx.int32), cache=probe)
    for filled in (probe, fresh):
        like = dict(tree_flatten([c.state for c in filled]))
        if like.keys() == leaves.keys():
            break
    else:
        _refuse("its arrays are not those of this model's caches")
    arrays_only = tuple(f"{i}." for i, c in enumerate(fresh) if isinstance(c, ArraysCache))
    for name, leaf in leaves.items():
        _check_leaf(name, leaf, like[name], () if name.startswith(arrays_only) else (2,))
    states = tree_unflatten(list(leaves.items()))
    made = [_filled(c, state) for c, state in zip(fresh, states, strict=True)]
    _check_layers(made, fresh)
    share(made)
    return made


def _filled(fresh: Any, state: Any) -> Any:
    """Make a cache of this state, with the fresh one's back end where it has one."""
    if not isinstance(fresh, H2OKVCache):
        return type(fresh).from_state(state)
    filled = copy.copy(fresh)
    filled.state = state
    return filled


def _check_leaf(name: str, leaf: Any, like: Any, free: tuple[int, ...]) -> None:
    """Check that a leaf is of the kind of this model's own; its first axis and the ``free`` ones may be longer."""
    if type(leaf) is not type(like):
        _refuse(f"{name} is {type(leaf).__name__}, and this model has {type(like).__name__}")
    if not isinstance(leaf, mx.array):
        return
    same = leaf.ndim == like.ndim and leaf.dtype == like.dtype
    axes = [i for i in range(1, like.ndim) if i not in free]
    if not same or any(leaf.shape[i] != like.shape[i] for i in axes):
        _refuse(f"{name} is {leaf.dtype} {leaf.shape}, and this model has {like.dtype} {like.shape}")


def _check_layers(made: Sequence[Any], fresh: Sequence[Any]) -> None:
    """Check that the layers have seen the same tokens, under this model's settings."""
    ours = [c for c in made if isinstance(c, H2OKVCache)]
    # Some models have layers that they don't use.
    used = [c for c in ours if not c.empty()] or ours
    # How many rows a layer keeps of them, its own state has been checked for.
    alike = {(c.sequences, tuple(n._replace(kept=0) for n in c._counts), c._batched, c._to_come) for c in used}
    if len(alike) > 1:
        _refuse("its layers have not seen the same tokens")
    batch, (count, *_), batched, _ = alike.pop()
    for i, (cache, new) in enumerate(zip(made, fresh, strict=True)):
        if isinstance(cache, H2OKVCache):
            fits = (*_settings(cache), cache.scale) == (*_settings(new), new.scale) and _same(
                cache.rotation, new.rotation
            )
        elif isinstance(cache, ArraysCache):
            fits = all(x.shape[0] == batch for x in cache.cache if x is not None)
        else:
            # In a batch, mlx_lm has other classes for these.
            fits = not batched and _has_rows(cache, new, batch, count.seen)
        if not fits:
            _refuse(f"layer {i} is no {type(new).__name__} that this model can have after {count.seen} tokens")


def _settings(cache: H2OKVCache) -> tuple[H2OConfig, dict[str, Any]]:
    return cache.config, cache.storage


def _has_rows(cache: KVCache | RotatingKVCache, new: KVCache | RotatingKVCache, batch: int, seen: int) -> bool:
    """Say whether one of mlx_lm's caches is as it can be after so many tokens of so many sequences."""
    if cache.keys is None:
        # A layer that the model does not use.
        return bool(list(cache.state) == list(new.state))
    width = cache.keys.shape[2]
    if cache.values.shape[:3] != cache.keys.shape[:3] or cache.keys.shape[0] != batch or cache.offset != seen:
        return False
    if isinstance(cache, KVCache):
        return bool(seen <= width)
    if (cache.keep, cache.max_size) != (new.keep, new.max_size):
        return False
    if seen <= width:
        return bool(cache._idx == seen)
    if width == cache.max_size:
        return bool(cache.keep < cache._idx <= width)
    # Longer than that, it ends with a call of several tokens.
    return bool(width > cache.max_size and cache._idx == width)


def _same(a: Rotation | None, b: Rotation | None) -> bool:
    if a is None or b is None:
        return a is b
    return a[1:] == b[1:] and bool(mx.array_equal(a.frequencies, b.frequencies).item())


def _are_texts(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(x, str) for item in values.items() for x in item)


def _refuse(what: str) -> NoReturn:
    raise ValueError(what)
