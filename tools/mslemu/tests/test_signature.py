"""The generated text is MLX's own, byte for byte."""

from importlib.metadata import version

import mlx.core as mx
import pytest

import mslemu
from mslemu.signature import Definition, generate

ALL = {"output_shapes": [(4,)], "output_dtypes": [mx.float32], "grid": (4, 1, 1), "threadgroup": (4, 1, 1)}
VECTOR, SMALL, SCALAR = mx.zeros((4, 4)), mx.zeros((3,)), mx.array(1.0)
BODY = "uint i = thread_position_in_grid.x; out[i] = a[i];"
KERNELS = {
    "plain": ({"source": BODY}, {"inputs": [VECTOR]}),
    "no attribute": ({"source": "out[0] = a[0];"}, {"inputs": [VECTOR]}),
    "constant address space": ({"source": BODY}, {"inputs": [SMALL]}),
    "zero dimensions": ({"source": "out[thread_position_in_grid.x] = a;"}, {"inputs": [SCALAR]}),
    "a Python number": ({"source": "out[thread_position_in_grid.x] = a;"}, {"inputs": [2.5]}),
    "a Python integer": ({"source": "out[thread_position_in_grid.x] = a;"}, {"inputs": [7]}),
    "shape, strides, ndim": (
        {"source": BODY + " (void)a_shape; (void)a_strides; (void)a_ndim;", "ensure_row_contiguous": False},
        {"inputs": [VECTOR[:, ::2]]},
    ),
    "a shape in a comment": ({"source": BODY + " // a_shape"}, {"inputs": [VECTOR]}),
    "a shape of no dimensions": ({"source": BODY + " // a_shape"}, {"inputs": [SCALAR]}),
    "a name within a name": (
        {"input_names": ["k", "new_k"], "source": "out[thread_position_in_grid.x] = new_k[new_k_shape[0] - 1] + k[0];"},
        {"inputs": [VECTOR, VECTOR]},
    ),
    "no attribute, but a shape and two outputs": (
        {"output_names": ["out", "out2"], "source": "out[0] = a_shape[0]; out2[0] = a[0];"},
        {"inputs": [VECTOR], "output_shapes": [(1,), (1,)], "output_dtypes": [mx.float32, mx.int32]},
    ),
    "atomic outputs": ({"source": BODY, "atomic_outputs": True}, {"inputs": [VECTOR], "init_value": 0}),
    "template": (
        {"source": BODY, "header": "// before\n"},
        {"inputs": [VECTOR], "template": [("T", mx.bfloat16), ("N", 64), ("F", True), ("G", False)]},
    ),
    "a header without a last line break": ({"source": BODY, "header": "struct S {};"}, {"inputs": [VECTOR]}),
    "every attribute": (
        {"source": "/* " + " ".join(sorted(mslemu.signature.ATTRIBUTES)) + " */"},
        {"inputs": [VECTOR, SMALL, SCALAR], "output_dtypes": [mx.uint8]},
    ),
    "no inputs": ({"source": "out[thread_position_in_grid.x] = 1;"}, {"inputs": []}),
}


def arguments(definition, call):
    names = [chr(ord("a") + i) for i in range(len(call["inputs"]))]
    return {"name": "some", "input_names": names, "output_names": ["out"], **definition}, {**ALL, **call}


def ours(definition, call):
    defaults = {"header": "", "ensure_row_contiguous": True, "atomic_outputs": False, **definition}
    given = Definition(**{k: tuple(v) if isinstance(v, list) else v for k, v in defaults.items()})
    inputs = [mx.array(value) for value in call["inputs"]]
    return generate(given, inputs, call["output_dtypes"], call.get("template", [])).whole()


@pytest.mark.parametrize("which", KERNELS)
def test_the_text_is_mlxs(which):
    definition, call = arguments(*KERNELS[which])
    assert ours(definition, call) == mslemu.mlx_text(definition, call)


@pytest.mark.skipif(version("mlx") == "0.32.3", reason="that version writes a minus into the function's name")
def test_a_negative_template_argument_gives_mlxs_text():
    definition, call = arguments({"source": BODY}, {"inputs": [VECTOR], "template": [("N", -12)]})
    assert ours(definition, call) == mslemu.mlx_text(definition, call)


@pytest.mark.parametrize("dtype", mslemu.signature.TYPE_NAMES, ids=str)
def test_every_dtype_has_mlxs_name(dtype):
    call = {"inputs": [mx.zeros((9,), dtype)], "output_dtypes": [dtype], "template": [("T", dtype)]}
    definition, call = arguments({"source": BODY}, call)
    assert ours(definition, call) == mslemu.mlx_text(definition, call)


def test_verbose_prints_it(run, capsys):
    run("out[0] = 1;", verbose=True)
    printed = capsys.readouterr().out
    assert printed.startswith("Generated source code for `k`:\n```\n[[kernel]] void custom_kernel_k_float(\n")


def test_template_arguments_have_mlxs_kinds(run):
    with pytest.raises(ValueError, match=r"Invalid template argument 1\.5"):
        run("out[0] = 1;", template=[("X", 1.5)])


def test_mlxs_text_is_mlxs_own_also_where_the_emulator_stands_in(monkeypatch):
    monkeypatch.setattr(mx.fast, "metal_kernel", mslemu.metal_kernel)
    definition, call = arguments(*KERNELS["plain"])
    assert ours(definition, call) == mslemu.mlx_text(definition, call)
