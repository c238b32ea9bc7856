import json

import pytest

from h2o_mlxlm.cli import main


def test_each_variant_takes_its_turns_and_says_under_what_circumstances(capsys):
    argv = ["bench", "--budget", "32", "48", "--kv-heads", "2", "--head-dim", "16"]
    argv += ["--steps", "5", "--dtype", "float16", "--json"]
    assert main(argv) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    variants = ["recency", "original", "key queries", "rolling"]
    assert [(row["budget"], row["variant"]) for row in rows] == [(b, v) for b in (32, 48) for v in variants]
    for row in rows:
        assert 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"]
        assert row["versions"].keys() == {"mlx", "mlx-lm", "h2o-mlxlm"}
        assert {"machine", "date", "device", "dtype", "steps"} <= row.keys()
        assert (row["ratio"] == 1.0) or row["variant"] != "recency"


def test_without_json_it_prints_a_line_for_each(capsys):
    assert main(["bench", "--budget", "32", "--kv-heads", "1", "--head-dim", "16", "--steps", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert all("x recency" in line for line in lines)


def test_its_caches_evict_at_every_step(monkeypatch):
    """A full cache is what is timed: each step lets a row go."""
    import argparse

    from h2o_mlxlm.cache import H2OKVCache
    from h2o_mlxlm.cli import bench

    made = []
    monkeypatch.setattr(H2OKVCache, "__init__", _noting(H2OKVCache.__init__, made))
    args = argparse.Namespace(dtype="float32", head_dim=16, kv_heads=2, group=1, batch=1)
    steps = bench._steps(args, 32)
    before = [c.evictions for c in made]
    for step in steps.values():
        step()
    assert len(made) == 3
    assert [c.evictions - b for c, b in zip(made, before, strict=True)] == [1, 1, 1]


def _noting(init, made):
    def noting(self, *args, **kwargs):
        made.append(self)
        init(self, *args, **kwargs)

    return noting


@pytest.mark.parametrize(("flag", "value"), [("--budget", "0"), ("--steps", "x"), ("--dtype", "int8")])
def test_bad_input_is_one_line(flag, value, capsys):
    with pytest.raises(SystemExit) as stop:
        main(["bench", flag, value])
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
