"""Every family against mlx_lm's own module, and every RoPE-like class of mlx_lm in one of the two tables."""

import importlib
import inspect
import pkgutil

import mlx.core as mx
import mlx.nn as nn
import mlx_lm.models
import pytest
from mlx_lm.models import deepseek_v2, hunyuan, hunyuan_v1_dense, internlm3, muse_spark
from mlx_lm.models.nanochat import apply_rotary_emb
from mlx_lm.models.rope_utils import ProportionalRoPE, SuScaledRoPE, YarnRoPE, initialize_rope

from h2o_rope import derotate, rerotate, rotate, rotation_of
from h2o_rope.families import FAMILIES, REFUSED

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
SHORT_LONG = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i / 3 for i in range(8)]}
BOTH_LAYOUTS = {
    "default": lambda traditional: nn.RoPE(16, traditional, base=10000.0),
    "odd base": lambda traditional: nn.RoPE(16, traditional, base=11158840.7),
    "linear": lambda traditional: nn.RoPE(16, traditional, base=500.0, scale=1 / 3),
    "llama3": lambda traditional: initialize_rope(16, 5e5, traditional, LLAMA3, 512),
    "yarn": lambda traditional: YarnRoPE(16, traditional, scaling_factor=8.0, original_max_position_embeddings=512),
    "yarn, mscale 1": lambda traditional: YarnRoPE(16, traditional, scaling_factor=8.0, mscale_all_dim=1),
    "proportional": lambda traditional: ProportionalRoPE(16, 6, traditional, base=1e6, factor=2.0),
}
ONE_LAYOUT = {
    "longrope": lambda: SuScaledRoPE(16, 10000.0, 131072, 4096, **SHORT_LONG),
    "deepseek yarn": lambda: deepseek_v2.DeepseekV2YarnRotaryEmbedding(16, scaling_factor=40.0, mscale=0.707),
    "hunyuan": lambda: hunyuan.DynamicNTKAlphaRoPE(16, 10000.0, 1000.0),
    "hunyuan dense": lambda: hunyuan_v1_dense.DynamicNTKAlphaRoPE(16, 10000.0, 1000.0),
}
CASES = ONE_LAYOUT | {
    f"{name}, {'traditional' if traditional else 'half-split'}": lambda make=make, t=traditional: make(t)
    for name, make in BOTH_LAYOUTS.items()
    for traditional in (False, True)
}
OFFSETS = (0, 1, 77, 4096, 131072)
U = {mx.float32: 2.0**-24, mx.float16: 2.0**-11, mx.bfloat16: 2.0**-8}  # unit roundoff
# The largest difference from the module, as a part of the largest value; the same at every offset, for we round
# an angle just as the module does. Measured on a CPU: 3.9 u, 2.7 u and 3.0 u.
TOLERANCE = {
    # There and back: twice cos, sin, two products and a sum. rotate alone is equal to the last bit.
    mx.float32: 8 * U[mx.float32],
    # On the CPU the module rounds cos, sin, both products and their sum to x's dtype, where we round once.
    mx.float16: 4 * U[mx.float16],
    mx.bfloat16: 4 * U[mx.bfloat16],
}
# A GPU's kernel makes frequencies with exp2, some last bits from ours, so it is off in proportion to the position;
# Metal's fast cos and sin are good to 2⁻¹³. Both are the specification's numbers, not measured.
ON_CPU = mx.default_device() == mx.Device(mx.cpu)
PER_CALL, PER_TOKEN = (0.0, 0.0) if ON_CPU else (2 * 2.0**-13, 8 * U[mx.float32])


def assert_near(ours, theirs, farthest):
    assert ours.dtype == theirs.dtype
    difference = mx.abs(ours.astype(mx.float32) - theirs.astype(mx.float32)).max().item()
    largest = mx.abs(theirs).max().item()
    tolerance = TOLERANCE[theirs.dtype] + PER_CALL + PER_TOKEN * farthest
    assert difference <= tolerance * largest, f"off by {difference} of {largest}"


def widths(name):
    """Whole rows, and rows with 8 dims that stay; DeepSeek's module rotates all of what it is given."""
    return (16,) if name == "deepseek yarn" else (16, 24)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rows_go_where_the_module_puts_them_and_come_back(name, dtype):
    rope = CASES[name]()
    for dims in widths(name):
        x = mx.random.normal((2, 3, 5, dims), key=mx.random.key(0)).astype(dtype)
        places = [offset + mx.arange(5, dtype=mx.int32) for offset in OFFSETS]
        theirs = [rope(x, offset=offset) for offset in OFFSETS]
        for at, keys in zip(places, theirs, strict=True):
            last = at[-1].item()
            assert_near(rotate(x, at, rope), keys, last)
            assert_near(derotate(keys, at, rope), x, last)
            assert mx.array_equal(derotate(keys, at, rope)[..., 16:], x[..., 16:])
            for to, expected in zip(places, theirs, strict=True):
                assert_near(rerotate(keys, at, to, rope), expected, max(last, to[-1].item()))


@pytest.mark.parametrize("name", CASES)
def test_a_module_and_its_rotation_do_the_same(name):
    rope = CASES[name]()
    x = mx.random.normal((1, 2, 3, 16), key=mx.random.key(1))
    at = mx.array([[[5, 0, 99]]])
    assert mx.array_equal(rotate(x, at, rope), rotate(x, at, rotation_of(rope)))


def test_the_factor_is_applied_once():
    for name in ("yarn, half-split", "longrope", "deepseek yarn"):
        rotation = rotation_of(CASES[name]())
        assert rotation.factor > 1.1
        x = mx.random.normal((1, 1, 4, 16), key=mx.random.key(2))
        at = mx.arange(4, dtype=mx.int32)
        length = mx.linalg.norm(x, axis=-1)
        keys = rotate(x, at, rotation)
        for _ in range(3):
            assert mx.allclose(mx.linalg.norm(keys, axis=-1), rotation.factor * length, rtol=1e-5)
            keys = rerotate(keys, at, at + 50, rotation)
            at = at + 50
        assert mx.allclose(derotate(keys, at, rotation), x, atol=1e-5)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_the_factor_is_the_one_the_module_multiplies_by(dtype):
    for name in ("yarn, half-split", "longrope", "deepseek yarn"):
        rope = CASES[name]()
        x = mx.random.normal((1, 1, 50, 16), key=mx.random.key(4)).astype(dtype)
        for i in range(50):  # at position 0 nothing turns, so the module's arithmetic is exact but for its factor
            row = x[:, :, i : i + 1]
            assert mx.array_equal(rotate(row, mx.array([0]), rope), rope(row, offset=0))


def test_infinite_periods_do_not_rotate():
    rotation = rotation_of(ProportionalRoPE(16, 6))
    x = mx.random.normal((1, 1, 1, 16), key=mx.random.key(3))
    still = [*range(3, 8), *range(11, 16)]
    assert mx.array_equal(rotate(x, mx.array([131072]), rotation)[..., still], x[..., still])


def test_every_family_has_a_case():
    tested = {f"{type(rope).__module__}.{type(rope).__qualname__}" for rope in (make() for make in CASES.values())}
    assert tested == FAMILIES.keys()


# The tables against mlx_lm

# Classes with such a name that are no rotary embedding.
NO_ROPE = {"mlx_lm.models.phixtral.RoPEAttention": "an attention layer; its rotation is an nn.RoPE"}
# Modules of mlx_lm that can't be imported, and so have no class to look at.
NOT_IMPORTED = {"mlx_lm.models.olmo": "exits without ai2-olmo; its rotation is an nn.RoPE"}


def rope_classes():
    """Every nn.Module of mlx.nn and mlx_lm.models that is named like a rotary embedding, and what can't be imported."""
    found, failed = set(), set()
    names = [m.name for m in pkgutil.walk_packages(mlx_lm.models.__path__, "mlx_lm.models.")]
    for name in [*names, "mlx.nn.layers.positional_encoding"]:
        try:
            module = importlib.import_module(name)
        except (ImportError, SystemExit):
            failed.add(name)
            continue
        for cls in vars(module).values():
            if inspect.isclass(cls) and issubclass(cls, nn.Module) and cls.__module__ == name:
                found.add(f"{name}.{cls.__qualname__}")
    like = {c for c in found if any(w in c.rsplit(".", 1)[-1].lower() for w in ("rope", "rotary"))}
    return like, failed


def test_every_rope_of_mlx_lm_is_known_or_refused():
    like, failed = rope_classes()
    assert failed <= NOT_IMPORTED.keys()
    assert like >= NO_ROPE.keys()
    assert FAMILIES.keys().isdisjoint(REFUSED)
    assert like - NO_ROPE.keys() == FAMILIES.keys() | REFUSED.keys()


def test_a_refused_family_says_why_and_what_works():
    ways_out = 'use positions="original" with this model, which works'
    dynamic = initialize_rope(16, 1e4, False, {"type": "dynamic", "factor": 2.0}, 512)
    for rope, why in [
        (dynamic, r"rope_utils.DynamicNTKScalingRoPE can.t be moved .* base depends on the sequence.s length"),
        (internlm3.DynamicNTKScalingRoPE(16), r"internlm3.DynamicNTKScalingRoPE can.t .* base depends on"),
        (muse_spark.VisionRoPE2D(head_dim=16), r"VisionRoPE2D can.t .* more than one position"),
    ]:
        for refused in (rotation_of, lambda rope: rotate(mx.ones((1, 1, 1, 16)), mx.array([0]), rope)):
            with pytest.raises(ValueError, match=f"{why}.*{ways_out}"):
                refused(rope)


def test_an_unknown_family_is_refused_by_name():
    class RoPE(nn.RoPE):
        """A stranger of a known name."""

    with pytest.raises(ValueError, match=r'RoPE can.t be moved .* is not known; known are mlx.*positions="original"'):
        rotation_of(RoPE(16))


def test_a_function_is_no_module():
    with pytest.raises(TypeError, match=r'the RoPE module that a model calls, got function.*positions="original"'):
        rotation_of(apply_rotary_emb)
