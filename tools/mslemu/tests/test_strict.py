"""The strict pass: address spaces, and what is not MSL."""

import mlx.core as mx
import pytest

import mslemu

LONG, SHORT = mx.arange(16.0), mx.arange(4.0)
HELPER = "float first(threadgroup float* p) { return p[0]; }\n"
TG = "threadgroup float x[4]; x[0] = a[0];\n"

# name: header, source, kind, line, what the message says; input a is in device memory
REFUSED = {
    "a device pointer for a threadgroup parameter": (
        HELPER,
        f"{TG}out[0] = first(a);",
        "address-space",
        2,
        "no matching function",
    ),
    "a threadgroup pointer for a device one": (
        "",
        f"{TG}device float* p = x;\nout[0] = p[0];",
        "address-space",
        2,
        "device float",
    ),
    "a cast between address spaces": (
        "",
        f"{TG}device float* p =\n  (device float*)x;\nout[0] = p[0];",
        "address-space",
        3,
        "a cast from threadgroup to device",
    ),
    "a cast that loses the address space": (
        "",
        "\nout[0] = ((float*)a)[0];",
        "address-space",
        2,
        "a cast from device to thread",
    ),
    "a constant input as a device pointer": (
        "",
        "const device float* p = b;\nout[0] = p[0];",
        "address-space",
        1,
        "device",
    ),
    "a pointer without an address space": (
        "",
        "float y = a[0];\nfloat* p = &y;\nout[0] = p[0];",
        "address-space",
        2,
        "'p' is a pointer or reference without",
    ),
    "a reference without an address space": (
        "",
        "float y = a[0];\nconst float& r = y;\nout[0] = r;",
        "address-space",
        2,
        "'r' is a pointer",
    ),
    "a parameter without an address space": (
        "void set(float* p) { *p = 1; }",
        "float y;\nset(&y);\nout[0] = y;",
        "address-space",
        1,
        "'p' is",
    ),
    "a dependent type without an address space": (
        "template <class U>\nU get(U* p) { return *p; }",
        "float y = a[0];\nout[0] = get(&y);",
        "address-space",
        2,
        "'p' is",
    ),
    "a store through a constant": ("", "b[0] = 1;\nout[0] = 1;", "compile", 1, "read-only"),
    "double": ("", "\n\ndouble y = a[0]; out[0] = float(y);", "not-msl", 3, "double"),
    "std": ("", "out[0] = std::max(a[0], a[1]);", "compile", 1, "std"),
    "CUDA's barrier": ("", "__syncthreads();\nout[0] = 1;", "compile", 1, "__syncthreads"),
    "max of two types": ("", "out[0] = max(a[0], 0);", "compile", 1, "no matching function for call to 'max'"),
    "new": ("", "out[0] = *new float(1);", "not-msl", 1, "'new'"),
    "an atomic in thread memory": (
        "",
        "atomic<int> n;\nout[0] = atomic_load_explicit(&n, memory_order_relaxed);",
        "address-space",
        2,
        "no matching",
    ),
    "a name that is not there": ("", "\nout[0] = c[0];", "compile", 2, "'c'"),
    "a threadgroup variable with a value": (
        "",
        "\nthreadgroup float y = 1;\nout[0] = y;",
        "not-msl",
        2,
        "not a threadgroup declaration",
    ),
}


@pytest.mark.parametrize("which", REFUSED)
def test_is_refused_with_its_line(run, which):
    header, source, kind, line, message = REFUSED[which]
    with pytest.raises(mslemu.MslError, match=message) as info:
        run(source, [LONG, SHORT], definition={"header": header})
    assert (info.value.kind, info.value.line) == (kind, line)
    assert info.value.file == ("k.header.metal" if "parameter without" in which or "dependent" in which else "k.metal")


def test_without_the_strict_pass_the_compiler_alone_decides(run):
    with mslemu.options(strict=False):
        assert run(f"{TG}device float* p = x;\nout[0] = p[0];", [LONG])[0] == 0
        with pytest.raises(mslemu.MslError, match=r"compile at k\.metal:2: .*'c'"):
            run("\nout[0] = c[0];", [LONG])
        with pytest.raises(mslemu.MslError, match=r"compile at k\.metal:2: no match.*max"):
            run("\nout[0] = max(a[0], 0);", [LONG])


def test_what_msl_allows_passes(run):
    header = """
    struct Pair { float first; int second; };
    template <typename U> void swap_(thread U& p, thread U& q) { U kept = p; p = q; q = kept; }
    float total(const device float* p, uint n) { float s = 0; for (uint i = 0; i < n; ++i) s += p[i]; return s; }
    float summed(threadgroup const float* p, uint n) { float s = 0; for (uint i = 0; i < n; ++i) s += p[i]; return s; }
    constant float table[2] = {0.5f, 1.5f};
    METAL_FUNC float4 twice(float4 v) { return v * 2.0f; }
    """
    source = """
    threadgroup float x[4], y;
    threadgroup float4 rows[2];  // threadgroup float z[1];
    x[0] = a[1];
    y = 2;
    rows[1] = ((const device float4*)a)[1];
    threadgroup float* p = x;
    thread float z = summed(p, 1) + total(a, 4);
    float w = 0;
    swap_(z, w);
    Pair pair = {w, 3};
    auto b0 = b;
    const device float4* v = reinterpret_cast<const device float4*>(a);
    float4 sum = twice(v[0]) + rows[1] + float4(1.0f, float2(2), 3) + vec<float, 4>(v[2].xy, v[3].zw);
    typedef vec<half, 4> H4;
    sum += static_cast<float4>(H4(0.0h, 0.0h, H4(v[0]).zw)) * 0.0f;
    out[0] = pair.first + pair.second + table[1] + b0[1] + sum.x + y;
    """
    want = 7 + 3 + 1.5 + 1 + (0 + 4 + 1 + 8) + 2
    assert run(source, [LONG, SHORT], definition={"header": header})[0] == want
