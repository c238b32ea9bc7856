"""A forward pass that does not end: its caches go on as if nothing had happened, or refuse to."""

import copy
import sys
from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest
from mlx_lm.models.gemma3_text import Model as Gemma
from mlx_lm.models.gemma3_text import ModelArgs

import h2o_mlxlm
from h2o_mlxlm import H2OConfig, make_prompt_cache

OURS = str(Path(h2o_mlxlm.__file__).parent)
SMALL = {"budget": 24, "n_sink": 2, "grace": 4}
SETTINGS = {
    "true": H2OConfig(**SMALL),
    "key": H2OConfig(**SMALL, queries="key"),
    "rolling": H2OConfig(**SMALL, positions="rolling"),
    "held": H2OConfig(**SMALL, evict_during_prefill=False),
}
REFUSED = "refused"
STARTED = "interrupted.*start from a fresh cache"


@pytest.fixture(scope="module")
def model(make_model):
    return make_model(num_hidden_layers=3)


def tokens(n, start=0):
    return (mx.arange(start, start + n) * 7 % 50 + 3)[None]


def warm(model, config, n=40):
    """Caches after a prompt and two single tokens, evaluated."""
    caches = make_prompt_cache(model, config)
    for part in (tokens(n), tokens(1, n), tokens(1, n + 1)):
        mx.eval(model(part, cache=caches))
    mx.eval([c.state for c in caches])
    return caches


def goes_on(model, caches):
    """The logits of three more tokens."""
    return mx.concatenate([model(tokens(1, 90 + i), cache=caches) for i in range(3)], axis=1)


def break_in(monkeypatch, model, layer, part, error):
    """Raise where this part of this layer begins."""

    def broken(*_):
        raise error

    monkeypatch.setitem(model.layers[layer], part, broken)


@pytest.mark.parametrize("n_tokens", [1, 5])
@pytest.mark.parametrize("part", ["input_layernorm", "mlp"])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("setting", SETTINGS)
def test_after_an_exception_in_a_layer_the_next_call_is_right_or_raises(
    model, monkeypatch, setting, layer, part, n_tokens
):
    caches = warm(model, SETTINGS[setting])
    untouched, fed = copy.deepcopy(caches), copy.deepcopy(caches)
    model(tokens(n_tokens, 60), cache=fed)
    with monkeypatch.context() as broken:
        break_in(broken, model, layer, part, KeyboardInterrupt() if part == "mlp" else RuntimeError("out of memory"))
        with pytest.raises((KeyboardInterrupt, RuntimeError)):
            model(tokens(n_tokens, 60), cache=caches)
    reached = layer + (part == "mlp")
    if reached in (0, 3):
        # No layer's cache has seen the tokens, or all have: there is nothing to mix up.
        assert mx.array_equal(goes_on(model, caches), goes_on(model, fed if reached else untouched))
        assert caches[0].evictions > 0
        return
    for _ in range(2):  # and it stays refused
        with pytest.raises(RuntimeError, match=STARTED):
            goes_on(model, caches)
    assert mx.array_equal(goes_on(model, untouched), goes_on(model, warm(model, SETTINGS[setting])))


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("full", range(3))
def test_layers_that_keep_mlx_lms_cache_are_watched_too(make_model, monkeypatch, full, layer):
    kinds = ["sliding_attention"] * 3
    kinds[full] = "full_attention"
    model = make_model(num_hidden_layers=3, layer_types=kinds, sliding_window=10)
    caches = warm(model, SETTINGS["true"])
    assert caches[full].evictions > 0
    with monkeypatch.context() as broken:
        break_in(broken, model, layer, "mlp", MemoryError())
        with pytest.raises(MemoryError):
            model(tokens(1, 60), cache=caches)
    if layer == 2:
        goes_on(model, caches)  # all layers have seen the token
        return
    for _ in range(2):
        with pytest.raises(RuntimeError, match=STARTED):
            goes_on(model, caches)


def test_a_copy_by_itself_waits_for_nobody_and_copies_together_do():
    """A window's cache that is copied for one of ours alone would stand still."""
    args = ModelArgs("gemma3_text", 32, 2, 32, 2, 16, num_key_value_heads=1, vocab_size=99, sliding_window_pattern=2)
    model = Gemma(args)
    caches = warm(model, H2OConfig(**SMALL))
    assert [type(c).__name__ for c in caches] == ["RotatingKVCache", "H2OKVCache"]
    together, each = copy.deepcopy(caches), [copy.deepcopy(c) for c in caches]
    assert (goes_on(model, each) == goes_on(model, caches)).all()
    # Of those copied together one is a pass ahead.
    together[0].offset += 2
    with pytest.raises(RuntimeError, match=STARTED):
        goes_on(model, together)


@pytest.mark.parametrize(("setting", "n_tokens"), [*((name, 1) for name in SETTINGS), ("true", 5)])
def test_an_interrupt_at_any_line_of_ours_leaves_nothing_wrong(model, setting, n_tokens):
    """The caches go on as if the call had never been, or as if it had ended, or every next call raises."""
    start = warm(model, SETTINGS[setting])
    untouched, fed = copy.deepcopy(start), copy.deepcopy(start)
    model(tokens(n_tokens, 60), cache=fed)
    expected = [REFUSED, continued(model, untouched), continued(model, fed)]
    outcomes = Counter()
    for line in count():
        caches = copy.deepcopy(start)
        where = interrupted_at(line, partial(model, tokens(n_tokens, 60), cache=caches))
        if where is None:
            break
        outcome = continued(model, caches)
        assert outcome in expected, f"silently wrong after an interrupt at {where}"
        outcomes[outcome is REFUSED] += 1
    assert outcomes[True] > 100
    assert outcomes[False] > 10


def continued(model, caches):
    """The logits of what follows, or REFUSED."""
    try:
        return goes_on(model, caches).tolist()
    except RuntimeError as error:
        return REFUSED if "start from a fresh cache" in str(error) else error


def interrupted_at(line, call):
    """Raise KeyboardInterrupt where our code is about to run this line of the call, counted from 0."""
    left = line

    def trace(frame, event, _):
        nonlocal left
        if not frame.f_code.co_filename.startswith(OURS):
            return trace if event == "call" else None
        if event == "line":
            left -= 1
            if left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt as error:
        return str(error)
    finally:
        sys.settrace(previous)
    return None
