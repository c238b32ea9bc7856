import json
import struct

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from h2o_core import Recording, read_trace, write_trace
from h2o_core.generators import zipf
from h2o_core.rows import softmax_rows
from h2o_core.traces import layers_of


def qkv(dtype=mx.float32, batch=()):
    keys = mx.random.split(mx.random.key(0), 3)
    shapes = (*batch, 4, 6, 8), (*batch, 2, 6, 8), (*batch, 2, 6, 3)
    q, k, v = (mx.random.normal(shape, key=key).astype(dtype) for shape, key in zip(shapes, keys, strict=True))
    return Recording(None, q, k, v, 0.25)


ATTENTION = zipf(6, 4, n_heavy=2).attention.whole()


def altered(x, *changes):
    x = mx.array(x)
    for at, value in changes:
        x[at] = value
    return x


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.safetensors"


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("batch", [(), (3,)])
def test_what_is_written_is_read(path, dtype, batch):
    written = qkv(dtype, batch)
    write_trace(path, written)
    read = read_trace(path)
    assert all(mx.array_equal(a, b) for a, b in zip(written[1:4], read[1:4], strict=True))
    assert (read.scale, read.n_kv_heads, read.attention, layers_of(path)) == (0.25, 2, None, [])
    assert mx.array_equal(read.rows().whole(), softmax_rows(written.queries, written.keys, 0.25).whole())
    attention = mx.broadcast_to(ATTENTION, (*batch, 4, 6, 6)).astype(dtype)
    write_trace(path, Recording(attention, n_kv_heads=2))
    read = read_trace(path)
    assert mx.array_equal(read.rows().whole(), attention)
    assert read.n_kv_heads == 2
    write_trace(path, Recording(attention))
    assert read_trace(path).n_kv_heads is None


def test_layers_are_read_one_at_a_time(path):
    write_trace(path, {3: qkv(), 0: Recording(ATTENTION), 11: qkv()._replace(values=None)}, {"model": "tiny"})
    assert layers_of(path) == [0, 3, 11]
    assert read_trace(path, 0).attention is not None
    assert read_trace(path, 11).values is None
    with pytest.raises(ValueError, match="has the layers 0, 3, 11: say which"):
        read_trace(path)
    with pytest.raises(ValueError, match="has no layer 1: there is 0, 3, 11"):
        read_trace(path, 1)
    assert mx.load(str(path), return_metadata=True)[1]["model"] == "tiny"


BAD = {
    "attention must be .* got shape": {"attention": ATTENTION[:, :5]},
    "three axes, or four with a batch": {"attention": ATTENTION[0]},
    "none empty": {"attention": mx.zeros((0, 4, 4))},
    "float32, float16 or bfloat16, got mlx.core.int32": {"attention": ATTENTION.astype(mx.int32)},
    "attention or queries and keys, not both": {"attention": ATTENTION, "queries": qkv().queries},
    "rows 0 to 5 see later tokens": {"attention": altered(ATTENTION, ((2, 1, 3), 0.1))},
    "sum to 1, and rows 0 to 5 are off by 0.1": {"attention": altered(ATTENTION, ((2, 0, 0), 1.1))},
    "finite and at least 0, and rows 0 to 5 are not": {"attention": altered(ATTENTION, ((2, 1, 0), -0.1))},
    "finite and at least 0": {"attention": altered(ATTENTION, ((2, 1, 0), mx.nan))},
    "n_kv_heads must divide the 4 query heads, got 3": {"attention": ATTENTION, "n_kv_heads": mx.array(3)},
    "n_kv_heads must be a number of heads, got 0": {"attention": ATTENTION, "n_kv_heads": mx.array(0)},
    "n_kv_heads must be one number, .* got mlx.core.float32": {"attention": ATTENTION, "n_kv_heads": mx.array(2.0)},
    "queries, keys and scale, got none": {"scale": mx.array(1.0)},
    "queries, keys and scale, got queries": {"queries": qkv().queries},
    "queries, keys and scale, got keys, queries": {"queries": qkv().queries, "keys": qkv().keys},
}
BAD_QKV = {
    "scale must be above 0 and finite, got 0": {"scale": mx.array(0.0)},
    "scale must be above 0 and finite, got nan": {"scale": mx.array(mx.nan)},
    "scale must be one number": {"scale": mx.array([1.0, 2.0])},
    "must agree, Hq a multiple of H": {"keys": qkv().keys[:, :5]},
    "must agree, Hq a multiple": {"keys": qkv().keys[..., :5]},
    "must agree, Hq a": {"queries": qkv().queries[:3]},
    "must agree, Hq": {"values": qkv().values[:1]},
    "must agree,": {"values": qkv().values[None]},
    "n_kv_heads must be the 2 heads of keys, got 4": {"n_kv_heads": mx.array(4)},
    "keys must be finite, and not all are": {"keys": altered(qkv().keys, ((0, 0, 0), mx.inf))},
}
GOOD_QKV = {"queries": qkv().queries, "keys": qkv().keys, "values": qkv().values, "scale": mx.array(0.25)}


@pytest.mark.parametrize(
    ("message", "tensors"), [*BAD.items(), *((message, GOOD_QKV | bad) for message, bad in BAD_QKV.items())]
)
def test_what_is_wrong_with_a_layer_is_one_sentence(path, message, tensors):
    mx.save_safetensors(str(path), {f"layers.2.{name}": x for name, x in tensors.items()})
    with pytest.raises(ValueError, match=rf"trace\.safetensors, layer 2: .*{message}") as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["weights", "layers.x.keys", "layers.0.keys.more", "layers.-1.keys", "scale\n"])
def test_a_tensor_of_another_name_is_refused(path, name):
    mx.save_safetensors(str(path), {name: ATTENTION})
    with pytest.raises(ValueError, match="is no trace: it has a tensor"):
        read_trace(path)


def test_nothing_bad_is_written(path):
    with pytest.raises(ValueError, match=r"ends in .safetensors, got trace.npz"):
        write_trace("trace.npz", qkv())
    with pytest.raises(ValueError, match="at least one layer"):
        write_trace(path, {})
    with pytest.raises(ValueError, match="sum to 1"):
        write_trace(path, Recording(2 * ATTENTION))
    with pytest.raises(ValueError, match="can't be written"):
        write_trace(path.parent / "no" / "folder.safetensors", qkv())
    assert not path.exists()
    with pytest.raises(ValueError, match="must have attention, or queries, keys and scale"):
        Recording(queries=qkv().queries).rows()


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no trace at .*none"):
        read_trace(tmp_path / "none.safetensors")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_a_clear_error(path, data):
    """Cut short, overwritten in places, or with a header that lies: read as it was, or one sentence."""
    write_trace(path, qkv())
    raw = bytearray(path.read_bytes())
    length = struct.unpack("<Q", raw[:8])[0]
    kind = data.draw(st.sampled_from(["cut", "bytes", "length", "header"]))
    if kind == "cut":
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    elif kind == "length":
        raw[:8] = struct.pack("<Q", data.draw(st.integers(0, 2**64 - 1)))
    elif kind == "bytes":
        for _ in range(data.draw(st.integers(1, 5))):
            raw[data.draw(st.integers(0, 8 + length - 1))] = data.draw(st.integers(0, 255))
    else:
        header = json.loads(raw[8 : 8 + length])
        field = data.draw(st.sampled_from(["shape", "data_offsets", "dtype"]))
        values = st.one_of(st.integers(-(2**63), 2**64), st.none(), st.text(max_size=3))
        changed = data.draw(st.one_of(values, st.lists(values, max_size=4)))
        header[data.draw(st.sampled_from(sorted(header.keys() - {"__metadata__"})))][field] = changed
        text = json.dumps(header).encode()
        raw = bytearray(struct.pack("<Q", len(text)) + text + raw[8 + length :])
    path.write_bytes(raw)
    try:
        mx.eval(*[x for x in read_trace(path)[:4] if x is not None])
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017
