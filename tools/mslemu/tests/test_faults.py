"""Every kind of fault is reported, with its line."""

import mlx.core as mx
import pytest

import mslemu

FOUR = mx.arange(4.0)
LANES = mx.arange(64.0)
I = "const uint i = thread_index_in_threadgroup;"  # noqa: E741
TG = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD = "simdgroup_barrier(mem_flags::mem_threadgroup);"
DEV = "threadgroup_barrier(mem_flags::mem_device);"

# name: source, kind, line, what the message says, arguments
FAULTS = {
    "race, read after write in threadgroup memory": (
        f"{I}\nthreadgroup float x[64];\nx[i] = i;\nout[i] = x[i / 2];",
        *("race", 4, r"'x'\[0\] is read by thread 1 of threadgroup 0 and written by thread 0 .* at k\.metal:3"),
        {"threads": 64, "shape": (64,)},
    ),
    "race that the order of running hides": (
        f"{I}\nthreadgroup float x;\nif (i == 0) x = 1;\nout[i] = x;",
        *("race", 4, "'x'"),
        {"threads": 2, "shape": (2,)},
    ),
    "race, two writes": (
        "threadgroup uint x;\nx = 1;\nout[0] = 0;",
        "race",
        2,
        "written by .* and written by",
        {"threads": 2},
    ),
    "race within a SIMD-group, which runs in no lockstep": (
        f"{I}\nthreadgroup float x[32];\nx[i] = i;\n(void)simd_sum(1);\nout[i] = x[31 - i];",
        *("race", 5, "no barrier for threadgroup memory"),
        {"threads": 32, "shape": (32,)},
    ),
    "race, write after read": (
        f"{I}\nthreadgroup float x[2];\nx[i] = i;\n{TG}\nif (i == 0)\n  out[0] = x[1];\nelse x[1] = 2;",
        *("race", 7, r"written by thread 1 .* and read by thread 0 .* at k\.metal:6"),
        {"threads": 2},
    ),
    "race in device memory past a threadgroup barrier": (
        f"{I}\nout[i] = i;\n{TG}\nout[i] = out[1 - i];",
        *("race", 4, "no barrier for device memory"),
        {"threads": 2, "shape": (2,)},
    ),
    "race in threadgroup memory past a device barrier": (
        f"{I}\nthreadgroup float x[2];\nx[i] = i;\n{DEV}\nout[i] = x[1 - i];",
        *("race", 5, "no barrier for threadgroup memory"),
        {"threads": 2, "shape": (2,)},
    ),
    "race of two threadgroups": (
        "out[0] = 1;",
        "race",
        1,
        "threadgroup 1 and written by .* of threadgroup 0",
        {"grid": (2, 1, 1)},
    ),
    "race of a plain access with an atomic one": (
        f"{I}\nthreadgroup atomic<uint> n;\nif (i == 0) atomic_store_explicit(&n, 0u, memory_order_relaxed);\nelse\n"
        "  out[0] = float(((threadgroup uint*)&n)[0]);",
        *("race", 5, "written by thread 0"),
        {"threads": 2},
    ),
    "a SIMD-group's barrier orders no other SIMD-group": (
        f"{I}\nthreadgroup float x[64];\nx[i] = i;\n{SIMD}\nout[i] = x[i ^ 32];",
        *("race", 5, "no barrier"),
        {"threads": 64, "shape": (64,)},
    ),
    "divergence: a barrier in a branch": (
        f"{I}\nif (i < 3)\n  {TG}\n{TG}\nout[i] = 0;",
        *(
            "divergence",
            3,
            r"thread 0 waits in threadgroup_barrier at k\.metal:3 while thread 3 waits .* at k\.metal:4",
        ),
        {"threads": 64, "shape": (64,)},
    ),
    "divergence: a thread has returned": (
        f"{I}\nif (i >= 3) return;\n{TG}\nout[i] = 0;",
        *("divergence", 3, "thread 3 has returned"),
        {"threads": 4, "shape": (4,)},
    ),
    "divergence within a SIMD-group": (
        f"{I}\nfloat s = 0;\nfor (uint j = 0; j < i; ++j)\n  s += simd_sum(1.0f);\n{TG}\nout[i] = s;",
        *("divergence", 4, "waits in simd_sum"),
        {"threads": 32, "shape": (32,)},
    ),
    "out of bounds: an input": (
        "float x = a[4];\nout[0] = x;",
        "out-of-bounds",
        1,
        "read of 4 bytes at byte 16 of 'a', which has 16",
        {},
    ),
    "out of bounds: before an input": ("int j = -1;\nout[0] = a[j];", "out-of-bounds", 2, "byte -4 of 'a'", {}),
    "out of bounds: far, into where another buffer might be": ("out[0] = a[9000];", "out-of-bounds", 1, "'a'", {}),
    "out of bounds: an output": (
        "out[0] = 1;\nout[1] = 1;",
        "out-of-bounds",
        2,
        "write of 4 bytes at byte 4 of 'out'",
        {},
    ),
    "out of bounds: a shape": ("out[0] = a_shape[1];", "out-of-bounds", 1, "'a_shape'", {}),
    "out of bounds: threadgroup memory by pointer": (
        "threadgroup float x[4];\nthreadgroup float* p = x;\np[4] = 1;\nout[0] = p[0];",
        *("out-of-bounds", 3, "byte 16 of 'x'"),
        {},
    ),
    "out of bounds: an array of a fixed size": (
        "float x[4] = {a[0]};\nout[0] = x[int(a[3]) + 1];",
        *("out-of-bounds", 2, "index 4 into an array of a fixed size"),
        {},
    ),
    "out of bounds: a vector at the end": (
        "const device float4* p = (const device float4*)(c + 5);\nout[0] = p[0].x + p[0].w;",
        "out-of-bounds",
        2,
        "'c'",
        {"inputs": [FOUR, FOUR, mx.arange(8.0)]},
    ),
    "uninitialised output": (
        "out[0] = out[1];",
        "uninitialised",
        1,
        r"'out'\[1\] is read .* nobody wrote it",
        {"shape": (2,)},
    ),
    "uninitialised output, by an atomic": (
        "atomic_fetch_add_explicit(&out[0], 1.0f, memory_order_relaxed);",
        *("uninitialised", 1, r"'out'\[0\]"),
        {"definition": {"atomic_outputs": True}},
    ),
    "uninitialised threadgroup memory": (
        "threadgroup half x[4];\n\nout[0] = x[2];",
        "uninitialised",
        3,
        r"'x'\[2\]",
        {},
    ),
    "uninitialised in the next threadgroup": (
        "threadgroup float x;\nif (thread_position_in_grid.x == 0) x = 1;\nout[thread_position_in_grid.x] = x;",
        *("uninitialised", 3, "threadgroup 1"),
        {"grid": (2, 1, 1), "shape": (2,)},
    ),
    "uninitialised variable": ("float x;\nx += a[0];\nout[0] = x;", "compile", 2, "'x' is .*uninitialized", {}),
    "write to an input": (
        "out[0] = 0;\n((device float*)a)[1] = 0;",
        "write-to-input",
        2,
        "'a' is an input",
        {"inputs": [LANES]},
    ),
    "a lane that takes no part": (
        f"{I}\nif (i >= 20) return;\nout[i] = simd_shuffle_xor(float(i), 16);",
        *("inactive-lane", 3, "simd_shuffle_xor by thread 4 .* reads lane 20"),
        {"threads": 32, "shape": (32,)},
    ),
    "a lane beyond a small threadgroup": ("out[0] = simd_shuffle(1.0f, 1);", "inactive-lane", 1, "reads lane 1", {}),
    "too much threadgroup memory": (
        "threadgroup float x[8000];\nthreadgroup half y[1000];\nx[0] = y[0] = 1;\nout[0] = x[0];",
        *("threadgroup-memory", 2, "'y' makes it 34000 bytes, and a threadgroup has 32768"),
        {},
    ),
    "overflow of a sum": ("int x = 2147483647;\nx += int(a[1]);\nout[0] = x;", "overflow", 2, "signed sum", {}),
    "overflow of a product": ("int x = 65536 * int(a[1]);\nout[0] = x *\n  x;", "overflow", 2, "signed product", {}),
    "division by zero": ("out[0] = 7 / int(a[0]);", "overflow", 1, "division by zero", {}),
    "a shift too far": ("out[0] = 1 << (32 + int(a[0]));", "undefined", 1, "shift", {}),
    "a float too large for an integer": ("out[0] = int(a[1] * 3e9f);", "undefined", 1, "out of the range", {}),
    "in the header": (
        "out[0] = second(a);",
        *("out-of-bounds", 3, "'a'"),
        {
            "definition": {"header": "// a helper\nfloat second(const constant float* p) {\n  return p[7];\n}\n"},
            "file": "k.header.metal",
        },
    ),
}


@pytest.mark.parametrize("which", FAULTS)
def test_a_fault_is_reported_with_its_line(run, which):
    source, kind, line, message, given = FAULTS[which]
    given = {"inputs": [FOUR], **given}
    file = given.pop("file", "k.metal")
    with pytest.raises(mslemu.MslError, match=message) as info:
        run(source, **given)
    assert (info.value.kind, info.value.file, info.value.line) == (kind, file, line)
    assert "\n" not in str(info.value)
    assert str(info.value).startswith(f"{kind} at {file}:{line}: ")


def test_without_barrier_memory_is_ordered_by_the_right_barrier(run):
    # Each of these differs from a fault above by its barrier alone.
    run(f"{I}\nout[i] = i;\n{DEV}\nfloat x = out[1 - i];\n{DEV}\nout[i] = x;", threads=2, shape=(2,))
    both = "threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);"
    run(
        f"{I}\nthreadgroup float x[2];\nx[i] = out[i] = i;\n{both}\nout[i + 2] = x[1 - i] + out[1 - i];",
        threads=2,
        shape=(4,),
    )

    run(f"{I}\nthreadgroup float x[64];\nx[i] = i;\n{SIMD}\nout[i] = x[i ^ 1];", threads=64, shape=(64,))


def test_all_faults_are_kept(run):
    with pytest.raises(mslemu.MslError, match=r"^uninitialised at k\.metal:1: .* \(and 1 more\)$") as info:
        run("out[0] = out[1];\nout[2] = out[3];", shape=(4,))
    assert [(fault.kind, fault.line) for fault in info.value.faults] == [("uninitialised", 1), ("uninitialised", 2)]


def test_a_launch_after_a_fault_is_clean(run):
    for _ in range(2):
        with pytest.raises(mslemu.MslError, match="divergence"):
            run(f"{I}\nif (i == 0) return;\n{TG}\nout[0] = 1;", threads=4)
    assert run("out[0] = 3;")[0] == 3


def test_sizes_are_checked_as_mlx_checks_them(run):
    with pytest.raises(ValueError, match=r"Thread group size \(2048\) is greater"):
        run("out[0] = 1;", threads=2048)
    with pytest.raises(ValueError, match=r"Expected `output_dtypes` to have size 1 but got size 2\."):
        mslemu.metal_kernel("k", [], ["out"], "")(
            inputs=[], output_shapes=[(1,)], output_dtypes=[mx.int8, mx.int8], grid=(1, 1, 1), threadgroup=(1, 1, 1)
        )
    with pytest.raises(ValueError, match="at least 1, got"):
        run("out[0] = 1;", grid=(0, 1, 1))
    with pytest.raises(ValueError, match="at least one output"):
        mslemu.metal_kernel("k", [], [], "")
    with pytest.raises(ValueError, match="Unknown compile option `speed`"):
        mslemu.metal_kernel("k", [], ["out"], "", compile_options={"speed": "high"})
