"""tools/kernel_check.py, which waits for a machine with a GPU: what of it can run without one."""

import importlib.util
from pathlib import Path

import mlx.core as mx
import pytest

import mslemu
from h2o_metal import kernel

PATH = Path(__file__).parents[2] / "tools/kernel_check.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("kernel_check", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["emulator"])
def emulator(request, monkeypatch):
    monkeypatch.setattr(kernel, "builder", mslemu.metal_kernel)


def test_every_kernel_is_checked_and_timed(emulator, tool, capsys):
    assert tool.main(["cuda", "--small", "--turns", "1"]) == 0
    first, second = capsys.readouterr().out.split("\n\n")
    named = {name for line in first.splitlines()[2:] for name in line.split("|")[1].replace(" ", "").split(",")}
    assert named == set(kernel.TEXTS)
    assert all(float(line.split("|")[3]) <= 1 for line in first.splitlines()[2:])
    variants = [line.split(" | ")[:3] for line in second.strip().splitlines()[2:]]
    assert [v[2] for v in variants] == ["mx.fast", "kernels", "h2o_core"] * 2
    assert {v[0] for v in variants} == {"| decode step", "| chunk"}


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("h2o_evict", "rank >= least", "rank > least"),
        ("h2o_victims", "victim[head] = gone", "victim[head] = gone + 1u"),
        ("h2o_rotate", "T(a / after)", "T(a + 0.001f)"),
    ],
)
def test_a_kernel_that_is_off_is_told(emulator, tool, monkeypatch, capsys, name, right, wrong):
    def broken(**definition):
        if definition["name"] == name:
            assert right in definition["source"]
            definition["source"] = definition["source"].replace(right, wrong)
        return mslemu.metal_kernel(**definition)

    monkeypatch.setattr(kernel, "builder", broken)
    monkeypatch.setattr(tool, "timed", lambda *_: [])
    assert tool.main(["cuda", "--small"]) == 1
    off = [line for line in capsys.readouterr().out.split("\n\n")[0].splitlines()[2:] if float(line.split("|")[3]) > 1]
    assert len(off) == 1
    assert name in off[0]


def test_a_kernel_that_no_check_launches_is_told(emulator, tool, monkeypatch):
    monkeypatch.setattr(tool, "CHECKS", tool.CHECKS[:-1])
    with pytest.raises(RuntimeError, match=r"no check launched h2o_rotate$"):
        tool.checked(tool.SMALL)


@pytest.mark.parametrize("backend", ["metal", "cuda"])
def test_without_a_gpu_it_refuses_in_one_line(tool, monkeypatch, backend):
    monkeypatch.setattr(kernel, "builder", None)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    monkeypatch.setattr(mx.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refused:
        tool.main([backend])
    assert str(refused.value).startswith(
        f"kernel_check: kernels on '{backend}' were asked for, which mlx does not find"
    )
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: backend"),
        (["fast"], "invalid choice: 'fast'"),
        (["cuda", "--turns", "0"], "--turns is at least 1, got 0"),
    ],
)
def test_arguments_are_checked(tool, capsys, arguments, message):
    with pytest.raises(SystemExit):
        tool.main(arguments)
    assert message in capsys.readouterr().err
