"""What tests of kernels are made with: barriers taken out, launches counted, the cache shared."""

import inspect
import os
import subprocess
import sys

import mlx.core as mx
import pytest

import mslemu
from mslemu import build

REDUCTION = """// threadgroup_barrier(mem_flags::mem_none);
threadgroup float part[64];
const uint i = thread_index_in_threadgroup;
part[i] = a[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
for (uint step = 32; step > 0; step /= 2) {
  if (i < step) part[i] += part[i + step];
  metal::threadgroup_barrier(
      mem_flags(mem_flags::mem_threadgroup));
}
if (i == 0) out[0] = part[0];
simdgroup_barrier(mem_flags::mem_none);
"""
A = mx.arange(64.0)


def test_barriers_are_listed_with_their_lines():
    found = mslemu.barriers(REDUCTION)
    assert [barrier.line for barrier in found] == [5, 8, 12]
    assert found[1].text == "metal::threadgroup_barrier(\n      mem_flags(mem_flags::mem_threadgroup))"
    assert REDUCTION[found[2].begin : found[2].end] == "simdgroup_barrier(mem_flags::mem_none)"


def test_without_a_barrier_every_other_line_stays():
    cut = mslemu.without_barrier(REDUCTION, 1)
    assert len(mslemu.barriers(cut)) == 2
    assert len(cut) == len(REDUCTION)
    changed = [
        i for i, pair in enumerate(zip(REDUCTION.split("\n"), cut.split("\n"), strict=True), 1) if len({*pair}) > 1
    ]
    assert changed == [8, 9]
    with pytest.raises(IndexError, match="has 3 barriers, got 3"):
        mslemu.without_barrier(REDUCTION, 3)


@pytest.mark.parametrize("i", [0, 1])
def test_a_missing_barrier_is_reported(run, i):
    assert run(REDUCTION, [A], threads=64)[0] == 2016
    with pytest.raises(mslemu.MslError, match="race at"):
        run(mslemu.without_barrier(REDUCTION, i), [A], threads=64)


def test_an_unneeded_barrier_is_not(run):
    assert run(mslemu.without_barrier(REDUCTION, 2), [A], threads=64)[0] == 2016


def test_launches_are_counted(run):
    with mslemu.launches() as outer:
        run(REDUCTION, [A], threads=64)
        with mslemu.launches() as inner:
            run("out[thread_position_in_grid.x] = 1;", shape=(3,), grid=(3, 1, 1))
        with pytest.raises(mslemu.MslError, match="out-of-bounds"):
            run("out[1] = 1;")
    run("out[0] = 1;")
    assert [launch.name for launch in outer] == ["k", "k"]
    assert outer[0].threadgroup_bytes == 256
    assert outer[0].barriers == 7
    assert inner == [mslemu.Launch("k", (3, 1, 1), (1, 1, 1), 0, 0, 3)]


def test_the_signatures_are_mlxs():
    def names(text):
        return [part.split(":")[0].strip() for part in text.split("(", 1)[1].split(", ") if ":" in part]

    ours = list(inspect.signature(mslemu.metal_kernel).parameters)
    assert names(mx.fast.metal_kernel.__doc__.split(") ->")[0]) == ours
    theirs = mx.fast.metal_kernel("k", [], ["o"], "")
    call = inspect.signature(mslemu.metal_kernel("k", [], ["o"], "")).parameters
    assert [
        part.split(":")[0] for part in theirs.__doc__.split("*, ")[1].split(")")[0].split(", ") if ": " in part
    ] == list(call)
    assert all(parameter.kind is inspect.Parameter.KEYWORD_ONLY for parameter in call.values())


def test_options_are_checked_and_end_with_their_block():
    with (
        pytest.raises(ValueError, match="schedule must be one of forward, reverse, shuffled, got 'random'"),
        mslemu.options(schedule="random"),
    ):
        pass
    with mslemu.options(seed=3) as settings:
        assert settings.seed == 3
    with mslemu.options() as settings:
        assert settings.seed == 0


def test_a_schedule_is_the_same_each_time(run):
    source = """
    device atomic<uint>* turn = (device atomic<uint>*)&out[8];
    out[thread_position_in_grid.x] = atomic_fetch_add_explicit(turn, 1u, memory_order_relaxed);
    """
    orders = []
    for given in (
        {},
        {"schedule": "reverse"},
        {"schedule": "shuffled", "seed": 1},
        {"schedule": "shuffled", "seed": 1},
    ):
        with mslemu.options(**given):
            orders.append(run(source, threads=8, shape=(9,), dtype=mx.uint32, init_value=0).tolist()[:8])
    assert orders[0] == list(range(8))
    assert orders[1] == orders[0][::-1]
    assert orders[2] == orders[3] != orders[0]


def test_two_processes_build_the_same_kernel_at_once(tmp_path):
    script = (
        "import mlx.core as mx, mslemu\n"
        "k = mslemu.metal_kernel('k', [], ['out'], 'out[0] = 5;')\n"
        "o = k(inputs=[], output_shapes=[(1,)], output_dtypes=[mx.int32], grid=(1, 1, 1), threadgroup=(1, 1, 1))\n"
        "assert o[0].item() == 5\n"
    )
    env = {**os.environ, "MSLEMU_CACHE": str(tmp_path)}
    running = [subprocess.Popen([sys.executable, "-c", script], env=env) for _ in range(2)]
    assert [process.wait() for process in running] == [0, 0]
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".o", ".so"]


def test_the_cache_is_where_it_is_told_to_be(monkeypatch, tmp_path):
    monkeypatch.setenv("MSLEMU_CACHE", str(tmp_path))
    assert build.cache_folder() == tmp_path
    monkeypatch.delenv("MSLEMU_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.cache_folder() == tmp_path / "mslemu"


def test_a_compiler_that_is_not_there_is_named(run):
    with (
        mslemu.options(compiler="no-such-compiler"),
        pytest.raises(FileNotFoundError, match="no-such-compiler is not there"),
    ):
        run("out[0] = 1;")
