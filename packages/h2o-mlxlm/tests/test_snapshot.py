"""What a state must be before a cache takes it: each law, broken once."""

import json
import struct

import mlx.core as mx
import pytest

from h2o_mlxlm import H2OConfig, H2OKVCache, scaled_dot_product_attention
from h2o_mlxlm.safetensors_file import read_arrays
from h2o_rope import Rotation

SMALL = H2OConfig(budget=6, n_sink=1, grace=2)
ROTATION = Rotation(mx.array([1.0, 0.5]), traditional=True, factor=2.0, scale=0.5)


def fed(cache, *calls, batch=1):
    for i, n in enumerate(calls):
        q, k, v = (mx.random.normal((batch, h, n, 4), key=mx.random.key(9 * i + h)) for h in (4, 2, 2))
        mask = cache.make_mask(n)
        mx.eval(scaled_dot_product_attention(q, *cache.update_and_fetch(k, v), cache, 0.5, mask))
    return cache


def merged():
    batch = H2OKVCache.merge([fed(H2OKVCache(SMALL), n) for n in (3, 9)])
    batch.prepare(lengths=[2, 4], right_padding=[2, 0])
    return fed(batch, 2, batch=2)


def taken_back():
    cache = fed(H2OKVCache(H2OConfig(budget=6, n_sink=1, grace=2, rewind=3)), 9)
    cache.trim(3)
    return cache


CACHES = {
    "fresh": lambda: H2OKVCache(SMALL),
    "some": lambda: fed(H2OKVCache(SMALL), 3, batch=2),
    "full": lambda: fed(H2OKVCache(SMALL), 9, 1),
    "rolling": lambda: fed(H2OKVCache(H2OConfig(budget=6, n_sink=1, grace=2, positions="rolling"), 0.3, ROTATION), 9),
    "auto": lambda: fed(
        H2OKVCache(H2OConfig(budget=6, n_sink=1, grace=2, positions="auto", trained_length=8), None, ROTATION), 3, 1
    ),
    "held": lambda: fed(H2OKVCache(H2OConfig(budget=6, n_sink=1, grace=2, evict_during_prefill=False)), 9),
    "batch": merged,
    # Shorter than what counts as one call, and than a call whose tokens have been taken back.
    "few": lambda: fed(H2OKVCache(H2OConfig(budget=6, n_sink=1, grace=2, rewind=3)), 2),
    "taken back": taken_back,
}


@pytest.fixture(scope="module")
def states():
    return {name: make().state for name, make in CACHES.items()}


@pytest.mark.parametrize("name", CACHES)
def test_a_caches_own_state_is_lawful(states, name):
    state = states[name]
    again = H2OKVCache.from_state(state)
    assert again.state.keys() == state.keys()
    assert all(
        mx.array_equal(again.state[n], x) if isinstance(x, mx.array) else again.state[n] == x for n, x in state.items()
    )
    assert again.rotation is None or again.rotation[1:] == ROTATION[1:]


def put(x, value, *at):
    x = mx.array(x)
    x[at] = mx.array(value, x.dtype)
    return x


def swapped(x, gone):
    """A position of the first head swapped for one that it has evicted."""
    other = next(i for i in range(1, 8) if i not in x[0, 0].tolist())
    return mx.where((x == gone) & (mx.arange(2)[:, None] == 0), other, x)


ROWS = ("keys", "values", "scores", "totals", "positions")
COUNT = [10, 6, 9, False, False]
BROKEN = [
    # Which state, what of it changes, what the error says.
    ("full", {"about": None}, "its description is no JSON object"),
    ("full", {"about": "[]"}, "its description is no JSON object"),
    ("full", {"about": mx.array(1)}, "its description is no JSON object"),
    ("full", {"about": "[" * 10**5}, "its description is no JSON object"),
    ("full", {"format": 2}, "format must be 1, got 2: it was written by another version"),
    ("full", {"format": 1.0}, "format must be 1, got 1.0"),
    ("full", {"more": 1}, "its description must have batched, config, counts, rotation, scale, storage, to_come, got"),
    ("full", {"config": 5}, "its configuration has other fields"),
    ("full", {"config": {"budget": 6}}, "its configuration has other fields"),
    ("full", {"config.decay": 1.5}, r"decay must be in \(0, 1\], got 1.5"),
    ("full", {"config.budget": "6"}, "budget must be an integer"),
    ("full", {"config.queries": []}, r"queries must be one of"),
    ("full", {"scale": "1"}, "scale='1' is no number"),
    ("full", {"scale": float("nan")}, "scale=nan is no number"),
    ("full", {"scale": True}, "scale=True is no number"),
    ("full", {"rotation": [True, 1.0, 1.0]}, "it has a rotation, which"),
    ("full", {"frequencies": mx.ones(2)}, "it has a rotation, which"),
    ("rolling", {"frequencies": None}, 'positions="rolling" needs frequencies'),
    ("rolling", {"frequencies": mx.ones((1, 2))}, "needs frequencies, one float32"),
    ("rolling", {"frequencies": mx.ones(2, mx.float16)}, "needs frequencies, one float32"),
    ("rolling", {"frequencies": mx.array([1, mx.nan])}, "frequencies must be finite"),
    ("rolling", {"frequencies": mx.ones(0)}, "frequencies must be finite numbers, at least one"),
    ("rolling", {"frequencies": mx.ones(3)}, "3 frequencies turn more dims than keys have, 4"),
    ("rolling", {"rotation": None}, "rotation must be whether traditional"),
    ("rolling", {"rotation": [1, 1.0, 1.0]}, "rotation must be whether traditional"),
    ("rolling", {"rotation": [True, 0, 1.0]}, "a factor and a scale above 0"),
    ("rolling", {"rotation": [True, 1.0]}, "rotation must be"),
    ("full", {"batched": 1}, "batched must be true or false, got 1"),
    ("full", {"counts": []}, "counts must be one for each sequence"),
    ("full", {"counts": [COUNT, COUNT]}, "counts must be one for each sequence of a batch, or one in all"),
    ("full", {"counts": 5}, "counts must be one"),
    ("full", {"counts": [[10, 6, 9, False]]}, "a count must be three whole numbers and two truth values"),
    ("full", {"counts": [[10, 6, 9.0, False, False]]}, "a count must be three whole numbers"),
    ("full", {"counts": [[10, 6, float("nan"), False, False]]}, "a count must be three whole numbers"),
    ("full", {"counts": [[10, 6, 9, 0, False]]}, "two truth values"),
    ("full", {"counts": [[-1, -1, -1, False, False]]}, "no sequence can have Count"),
    ("full", {"counts": [[10, 7, 9, False, False]]}, "no sequence can have Count"),
    ("full", {"counts": [[10, 6, 11, False, False]]}, "no sequence can have Count"),
    ("full", {"counts": [[10, 6, 0, False, False]]}, "no sequence can have Count"),
    ("full", {"counts": [[2**31, 6, 9, False, False]]}, "no sequence can have Count"),
    ("full", {"counts": [[10, 10, 9, True, False]]}, "no sequence can have Count"),
    ("full", {"counts": [[10, 6, 9, False, True]]}, "no sequence can have Count"),
    ("rolling", {"counts": [[9, 6, 9, False, False]]}, "no sequence can have Count"),
    ("auto", {"counts": [[4, 4, 3, False, True]]}, "no sequence can have Count"),
    ("auto", {"counts": [[9, 6, 3, False, False]]}, "no sequence can have Count"),
    ("held", {"counts": [[9, 6, 9, True, False]]}, "no sequence can have Count"),
    ("held", {"counts": [[9, 6, 9, False, False]]}, "every head holds the rows that were counted"),
    ("full", {"to_come": [1]}, "to_come must be tokens for each of the 1 sequences of a batch"),
    ("batch", {"to_come": [1]}, "to_come must be tokens for each of the 2 sequences"),
    ("batch", {"to_come": [1, -1]}, "to_come must be"),
    ("batch", {"to_come": [1, 2.0]}, "to_come must be"),
    ("batch", {"counts": [COUNT], "to_come": None}, "there are 2 sequences and 1 counts"),
    ("fresh", {"counts": [[3, 3, 3, False, False]]}, "tokens were seen, but there are no rows"),
    ("some", {"keys": None}, "its arrays must be keys, positions, scores, seen, totals, values"),
    ("some", {"more": mx.array(1)}, "its arrays must be"),
    ("some", {"keys": "x"}, "keys must be .*, got 'str'"),
    ("some", {"keys": lambda x: x.astype(mx.int32)}, r"keys must be .*, got mlx.core.int32 \[2, 2, 3, 4\]"),
    ("some", {"positions": lambda x: x.astype(mx.uint32)}, "positions must be mlx.core.int32"),
    ("some", {"scores": lambda x: x.astype(mx.float16)}, "scores must be mlx.core.float32"),
    ("some", {"values": lambda x: x[0]}, r"values must be .*\[B, H, C, V\]"),
    ("some", {"values": lambda x: x[:, :1]}, "values has 1 along H, and 2 are expected"),
    ("some", {"totals": lambda x: x[..., :2]}, "totals has 2 along C, and 3 are expected"),
    ("some", {"seen": lambda x: x[:1]}, "seen has 1 along B, and 2 are expected"),
    ("some", {"values": lambda x: x[..., :0]}, "values has 0 along V"),
    ("some", {"seen": lambda x: x + 1}, "is not what was counted"),
    ("full", {n: (lambda x: x[:, :, :5]) for n in ROWS}, "but there are 5 slots"),
    ("full", {"positions": lambda x: put(x, 10, 0, 1, 0)}, "positions are -1 or below the tokens seen"),
    ("full", {"positions": lambda x: put(x, 2**31 - 1, 0, 1, 0)}, "positions are -1 or below the tokens seen"),
    ("full", {"positions": lambda x: mx.where(x < 0, -2, x)}, "positions are -1 or below the tokens seen"),
    ("full", {"positions": lambda x: mx.where(x == x[:, :, :1], x[:, :, 1:2], x)}, "a head holds a position once"),
    ("some", {"positions": lambda x: put(x, -1, 0, 0, 2)}, "every head holds the rows that were counted"),
    ("batch", {"positions": lambda x: x[..., ::-1]}, "rows come first, or fill budget"),
    ("full", {"positions": lambda x: swapped(x, 0)}, "sinks and the newest rows are held"),
    ("full", {"positions": lambda x: swapped(x, 9)}, "sinks and the newest rows are held"),
    ("full", {"scores": lambda x: put(x, -1, 0, 1, 0)}, "scores and totals are not negative"),
    ("full", {"totals": lambda x: -x}, "scores and totals are not negative"),
    ("full", {"totals": lambda x: x + 1}, "an empty slot has no score"),
    ("full", {"scores": lambda x: x + mx.nan}, "an empty slot has no score"),
    ("full", {"values": lambda x: x * mx.nan}, "an empty slot is finite"),
    ("full", {"keys": lambda x: x * mx.inf}, "an empty slot is finite"),
]  # fmt: skip


def broken(state, changes):
    about, arrays = json.loads(state["about"]), {n: x for n, x in state.items() if n != "about"}
    text = None
    for name, change in changes.items():
        if name == "about":
            text = change
        elif "." in name:
            about["config"] = about["config"] | {name.split(".")[1]: change}
        elif callable(change):
            arrays[name] = change(arrays[name])
        elif name in about or (name == "more" and not isinstance(change, mx.array)):
            about[name] = change
        else:
            arrays[name] = change
    return {n: x for n, x in arrays.items() if x is not None} | {
        "about": text if "about" in changes else json.dumps(about)
    }


@pytest.mark.parametrize(("name", "changes", "message"), BROKEN, ids=range(len(BROKEN)))
def test_a_broken_law_is_one_error(states, name, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        H2OKVCache.from_state(broken(states[name], changes))
    assert str(caught.value).startswith("this is no state that an H2O cache can have: ")


@pytest.mark.parametrize(
    "state", [None, 5, [], (), {}, "x", mx.array(1), [mx.array(1)] * 8, {"about": {"a": 1}}], ids=str
)
def test_anything_else_is_one_error(state):
    with pytest.raises(ValueError, match="this is no state that an H2O cache can have"):
        H2OKVCache.from_state(state)


def test_a_shape_whose_bytes_wrap_around_is_refused(tmp_path):
    """mlx's own reader takes these for arrays of no bytes, and reads outside of them."""
    shapes = {n: [4, 2**30, 2**30] for n in ("scores", "totals", "positions")}
    shapes |= {n: [4, 2**30, 2**30, 4] for n in ("keys", "values")}
    header = {n: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for n, shape in shapes.items()}
    header["positions"]["dtype"] = "I32"
    header["seen"] = {"dtype": "I32", "shape": [4], "data_offsets": [0, 16]}
    text, path = json.dumps(header).encode(), tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + struct.pack("<4i", 3, 3, 3, 3))
    arrays = mx.load(str(path))
    assert arrays["keys"].shape == (4, 2**30, 2**30, 4)
    about = json.loads(H2OKVCache(SMALL).state["about"]) | {"counts": [[3, 3, 3, False, False]]}
    with pytest.raises(ValueError, match="keys can't have the shape"):
        H2OKVCache.from_state(arrays | {"about": json.dumps(about)})
    with pytest.raises(ValueError, match="does not take the bytes"):
        read_arrays(path)


def test_a_state_that_is_refused_changes_nothing(states):
    cache = fed(H2OKVCache(SMALL), 9, 1)
    before = cache.state
    with pytest.raises(ValueError, match="seen"):
        cache.state = broken(states["some"], {"seen": lambda x: x + 1})
    assert cache.state.keys() == before.keys()
    assert all(x is before[n] or x == before[n] for n, x in cache.state.items())
