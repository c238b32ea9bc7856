"""The READMEs say what works: their Python runs, and so does the command they begin with."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from h2o_mlxlm import load, save_needs
from h2o_mlxlm.needs import needs_for

ROOT = Path(__file__).parents[2]


def blocks(readme, language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / readme).read_text(), re.DOTALL)


@pytest.mark.parametrize("readme", ["README.md", "packages/h2o-mlxlm/README.md"])
def test_its_python_runs(readme, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a README may save a file
    # What its ``calibrate`` writes, in an hour.
    measured = needs_for(load()[0])
    save_needs(tmp_path / "needs/needs.json", measured, {})
    names = {}
    for block in blocks(readme, "python"):
        exec(block, names)  # the blocks of one README follow one another
    assert capsys.readouterr().out
    assert names["cache"][0].tokens_kept <= 64
    assert names["cache"][0].tokens_seen > 20


@pytest.mark.parametrize("also", ["--max-tokens", "--budget-shape calibrated-layers"])
def test_its_commands_generate_past_the_budget(also):
    lines = "\n".join(blocks("README.md", "sh")).splitlines()
    line = next(line for line in lines if line.startswith("uv run h2o-mlxlm generate") and also in line)
    argv = [sys.executable, "-m", "h2o_mlxlm", *shlex.split(line)[3:]]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    kept, evicted = re.search(r"kept (\d+) per head, evicted (\d+)", done.stdout).groups()
    assert int(kept) == 64
    assert int(evicted) > 100
