"""What a call to a cache, or what a caller gives it, must not contradict, said once, at the door."""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import mlx.core as mx

from h2o_core import H2OConfig
from h2o_core.evidence import check_inputs
from h2o_core.scorer import Scorer
from h2o_mlxlm.counts import Call, outgrown
from h2o_mlxlm.forms import BlockForm, Form, RowForm
from h2o_mlxlm.slots import Slots
from h2o_rope import Rotation


def check_positions(config: H2OConfig, rotation: Rotation | None, forms: tuple[Form, Form]) -> None:
    """Refuse moving positions without what moves them, or with keys that can't be."""
    if config.positions != "original" and rotation is None:
        raise ValueError(
            f'positions="{config.positions}" needs the rotation of the model\'s keys, got rotation=None: '
            "make the cache with make_prompt_cache(model, config), or pass rotation_of(rope)"
        )
    if config.positions == "auto" and config.trained_length is None:
        raise ValueError(
            'positions="auto" needs trained_length, got None: make the cache with '
            "make_prompt_cache(model, config), which asks the model, or set it"
        )
    if config.positions == "auto" and isinstance(forms[0], BlockForm):
        raise ValueError(
            'positions="auto" stores keys anew when it turns, and blocks of keys are written once: use '
            'kv_quantizer="per_token", or positions="rolling" from the start'
        )


def check_storage(config: H2OConfig, forms: tuple[Form, Form]) -> None:
    """Refuse to store rows anew that are stored once: merged values, and rows that are taken back."""
    if config.scorer.merges and forms[1] != RowForm():
        raise ValueError(
            f"scorer {config.scorer.name!r} changes values that are stored, which quantising again would wear out: "
            "leave kv_bits out for values"
        )
    if config.rewind and any(isinstance(form, BlockForm) for form in forms):
        raise ValueError(
            f"rewind={config.rewind} writes rows back, and blocks of rows are written once: use "
            'kv_quantizer="per_token", or rewind=0'
        )


Inputs = Sequence[Mapping[str, mx.array]]
"""For each layer with an H2O cache, lowest first, what its scorer needs of the caller; see ``h2o_mlxlm.inputs``."""


def given_inputs(configs: Sequence[H2OConfig], inputs: Inputs | None) -> list[Mapping[str, mx.array]]:
    """Read what the user gave as inputs for each layer.

    Raises:
        ValueError: There are more or fewer than layers, or one is missing, not known, or no array of finite numbers.
    """
    each = [{}] * len(configs) if inputs is None else list(inputs)
    if len(each) != len(configs):
        raise ValueError(
            f"inputs has one dict for each layer with an H2O cache, of which this model has {len(configs)}, got "
            f"{len(each)}: h2o_mlxlm.inputs makes such a list"
        )
    for config, given in zip(configs, each, strict=True):
        check_given(config.scorer, given)
    return each


def check_given(scorer: Scorer, inputs: Mapping[str, Any] | None) -> None:
    """Refuse inputs that a scorer could not count with, before a model runs; see ``check_inputs``."""
    for name, x in (inputs or {}).items():
        found = f"an array {list(x.shape)} with others among them" if isinstance(x, mx.array) else repr(x)
        if not isinstance(x, mx.array) or not mx.isfinite(x).all().item():
            raise ValueError(
                f"inputs are arrays of finite numbers, got {name}={found:.80}: h2o_mlxlm.inputs makes them of a text"
            )
    check_inputs(scorer, inputs)


def check_call(
    config: H2OConfig, call: Call, slots: Slots | None, keys: mx.array, values: mx.array, batched: bool
) -> None:
    """Refuse a call that contradicts the ones before it, or goes past what the model was trained for."""
    if config.trained_length is not None:
        _check_places(config, call)
    if batched and keys.shape[0] != len(call.before):
        raise ValueError(
            f"a batch keeps its sequences from call to call: it has {len(call.before)}, the call brings "
            f"{keys.shape[0]}; filter or extend it first"
        )
    if slots is None:
        return
    batch = slots.state.seen.shape[0]
    for name, new, old in (("keys", keys, slots.keys.kind), ("values", values, slots.values.kind)):
        was, now = (batch, *old[:2]), (*new.shape[:2], new.shape[3])
        if was != now or old[2] != new.dtype:
            raise ValueError(
                f"{name} of one cache keep batch, heads, width and dtype: it holds {was} {old[2]}, "
                f"the call brings {now} {new.dtype}; make a fresh cache with make_prompt_cache"
            )


def _check_places(config: H2OConfig, call: Call) -> None:
    for count, n in zip(call.before, call.real, strict=True):
        if outgrown(config, count.place + n):
            raise ValueError(
                f'positions="auto" keeps positions below trained_length={config.trained_length}, but a call of '
                f"{n} tokens at {count.place} goes beyond: use smaller calls (prefill_step_size) or a smaller budget"
            )


def check_unchanged(config: H2OConfig, given: tuple[mx.array, mx.array], waiting: tuple[mx.array, mx.array]) -> None:
    """Refuse attention to other keys or values than those that wait for it."""
    if any(a is not b for a, b in zip(given, waiting, strict=True)):
        raise ValueError(
            f"with rewind={config.rewind} a layer must attend to the keys and values that its cache returned, but got "
            "others: this model changes them on the way; use rewind=0"
        )


def raise_unreported() -> NoReturn:
    """Say why a call without a mass can't end."""
    raise RuntimeError(
        'an H2O cache with queries="true" never got its attention reported, so it can\'t know what to '
        "evict: make it with h2o_mlxlm.make_prompt_cache(model, config) or install(model, config), which "
        'place the hook, or use H2OConfig(queries="key"), which needs none. If the hook was there, a call was '
        "interrupted before its attention: start from a fresh cache"
    )


def raise_ended() -> NoReturn:
    """Say why attention can't be reported now."""
    raise RuntimeError(
        "attention was reported to an H2O cache whose call has ended: read its properties before or after "
        "a forward pass of the model, not during one; if a layer attends twice to one cache, make the cache with "
        "make_prompt_cache, which sees that"
    )


def is_whole(value: Any, least: int, most: int) -> bool:
    """Say whether this is a whole number in [least, most]; JSON's true is none."""
    return type(value) is int and least <= value <= most
