"""Back ends: who may be asked for, and a decode step that is one launch, against the same in steps."""

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.generate import generate_step

import h2o_metal.kernel
import mslemu
from h2o_core import H2OConfig
from h2o_metal.kernel import launches
from h2o_mlxlm import make_prompt_cache, scaled_dot_product_attention
from h2o_mlxlm.backend import NAMES, REFERENCE, backend_of
from h2o_mlxlm.cache import H2OKVCache

# The reference's functions, called as a fused back end's are.
FUSED = REFERENCE._replace(name="fused", fused=True)


@pytest.fixture
def emulated(monkeypatch):
    """Kernels run on the emulator, so that "metal" can be asked for on any machine."""
    monkeypatch.setattr(h2o_metal.kernel, "builder", mslemu.metal_kernel)


def rows(seed, *shape):
    return mx.random.normal(shape, key=mx.random.key(seed))


def call(cache, seed, n, batch=1, heads=2, group=2, width=8):
    keys, values = rows(seed, batch, heads, n, width), rows(seed + 1, batch, heads, n, width)
    queries, mask = rows(seed + 2, batch, heads * group, n, width), cache.make_mask(n)
    shown = cache.update_and_fetch(keys, values)
    return scaled_dot_product_attention(queries, *shown, cache, width**-0.5, mask)


def same(cache, other):
    assert cache.kept_positions.tolist() == other.kept_positions.tolist()
    for name in ("scores", "totals"):
        assert mx.allclose(getattr(cache, name), getattr(other, name), atol=1e-5)


@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_kernels_by_name_run_or_raise(monkeypatch, name):
    monkeypatch.setattr(getattr(mx, name), "is_available", lambda: False)
    with pytest.raises(ValueError, match=rf'backend="{name}" can\'t run here: .* or use "reference"'):
        H2OKVCache(H2OConfig(8), backend=name)


def test_an_unknown_name_is_refused_at_construction(make_model):
    with pytest.raises(ValueError, match=f"backend must be one of {', '.join(map(repr, NAMES))}, got 'gpu'"):
        make_prompt_cache(make_model(), H2OConfig(8), backend="gpu")


def test_auto_is_what_there_is():
    there = [name for name in ("metal", "cuda") if getattr(mx, name).is_available()]
    assert backend_of("auto").name == (there or ["reference"])[0]


@settings(deadline=None, max_examples=30)
@given(
    budget=st.integers(6, 20),
    sizes=st.lists(st.sampled_from([1, 1, 1, 2, 5, 30]), min_size=5, max_size=30),
    decay=st.sampled_from([1.0, 0.9]),
    long_share=st.sampled_from([0.0, 0.5]),
    holds=st.booleans(),
    batch=st.integers(1, 3),
)
def test_a_fused_step_is_the_same_step(budget, sizes, decay, long_share, holds, batch):
    config = H2OConfig(budget, n_sink=1, grace=2, decay=decay, long_share=long_share, evict_during_prefill=not holds)
    fused, plain = H2OKVCache(config, backend=FUSED), H2OKVCache(config, backend=REFERENCE)
    for i, n in enumerate(sizes):
        ours, theirs = call(fused, 3 * i, n, batch), call(plain, 3 * i, n, batch)
        assert mx.allclose(ours, theirs, atol=1e-5)
    same(fused, plain)


def test_a_fused_step_is_the_same_for_sequences_of_different_lengths():
    config = H2OConfig(8, n_sink=1, grace=2)
    both = []
    for backend in (FUSED, REFERENCE):
        alone = []
        for i, n in enumerate((3, 20, 9)):
            alone.append(H2OKVCache(config, backend=backend))
            call(alone[-1], 100 * i, n)
        both.append(H2OKVCache.merge(alone))
        outs = [call(both[-1], 1000 + i, 1, batch=3) for i in range(12)]
        assert mx.isfinite(outs[-1]).all()
    assert both[0].evictions.tolist() == [7, 24, 13]
    same(*both)


@pytest.mark.parametrize("positions", ["rolling", "auto"])
def test_a_fused_step_is_the_same_where_keys_roll(make_model, positions):
    model = make_model(max_position_embeddings=48)
    found = []
    for backend in (FUSED, REFERENCE):
        caches = make_prompt_cache(model, H2OConfig(24, positions=positions))
        for cache in caches:
            cache.backend = backend
        found.append([t for t, _ in zip(generate(model, caches), range(50), strict=False)])
        assert caches[0].evictions > 20
    assert found[0] == found[1]


def generate(model, caches, prompt=(5, 9, 33, 7, 60, 2, 41, 18, 90, 77, 3, 3, 54, 21, 8)):
    for token, _ in generate_step(mx.array(prompt), model, max_tokens=64, prompt_cache=caches):
        yield int(token)


def test_the_models_text_is_the_same_by_kernels(make_model, emulated):
    """And a decode step is one launch for each layer, the prompt's last token among them."""
    model, texts = make_model(), {}
    for backend in ("reference", "metal"):
        caches = make_prompt_cache(model, H2OConfig(8, n_sink=2, grace=2), backend=backend)
        with launches() as ran:
            texts[backend] = [t for t, _ in zip(generate(model, caches), range(6), strict=False)]
        assert caches[0].evictions >= 12
    assert texts["metal"] == texts["reference"]
    prefill = ["h2o_softmax_rows", "h2o_column_mass", "h2o_evict"]
    steps = [name for name in ran if name not in prefill]
    # One more step than tokens: generate_step runs ahead.
    assert set(steps) == {"h2o_decode"}
    assert len(steps) % len(caches) == 0
    assert 6 <= len(steps) // len(caches) <= 8
    assert sorted(ran[: len(ran) - len(steps)]) == sorted(prefill * len(caches))


def test_a_second_attention_to_a_call_that_has_ended_is_refused():
    cache = H2OKVCache(H2OConfig(8), backend=FUSED)
    call(cache, 0, 4)
    call(cache, 3, 1)
    keys, values = cache.keys_and_values()
    with pytest.raises(RuntimeError, match="whose call has ended"):
        scaled_dot_product_attention(rows(9, 1, 4, 1, 8), keys, values, cache, 1.0, None)
