"""Several machines, as three ranks on this one: each evicts for its own heads, and the text is that of one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import MODELS, loaded
from .ranks import SETTINGS, generated

# Tokens of the prompt and new ones. The ranks wait for one another 60 times a token with SmolLM2.
LENGTHS = {"mistral": (60, 24), "smollm2": (40, 4)}
TIE = 1e-3  # in nats: sums over ranks differ from sums over one in their last bits


def launched(name, prompt, n_new):
    """What each of three ranks prints, by rank."""
    launch = [Path(sys.executable).with_name("mlx.launch"), "-n", "3", "--backend", "ring", "--python", sys.executable]
    command = [*launch, Path(__file__).with_name("ranks.py"), MODELS[name] or name, n_new, *prompt]
    # Three ranks, each with as many threads as there are cores, would wait for each other.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(map(str, command), env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(ranks, key=lambda rank: rank["rank"])


def texts_part(steps, expected):
    """Say whether two texts differ, and insist that they part at a near-tie, where either is right."""
    for (token, _), (other, gap) in zip(steps, expected, strict=True):
        if token != other:
            assert gap < TIE, f"{token} where one rank writes {other}, which is {gap} nats ahead"
            return True
    return False


@pytest.mark.parametrize("name", LENGTHS)
def test_three_ranks_write_what_one_writes(name):
    n_prompt, n_new = LENGTHS[name]
    prompt = [300 + 7 * i % 200 for i in range(n_prompt)]
    ranks, alone = launched(name, prompt, n_new), generated(loaded(name).model, prompt, n_new)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    for rank in ranks:
        assert all(evicted == n_prompt + n_new - SETTINGS["budget"] > 0 for evicted in rank["evictions"])
        # Each rank has one of the three KV heads, and keeps in it what one rank keeps there.
        if not texts_part(rank["steps"], alone["steps"]):
            assert rank["kept"] == [[heads[rank["rank"]]] for heads in alone["kept"]]


def test_the_readmes_options_exist():
    """There are no two Macs here: that the tool knows the options is what can be tried."""
    tool = Path(sys.executable).with_name("mlx.distributed_config")
    usage = subprocess.run([tool, "--help"], capture_output=True, text=True, check=True).stdout
    readme = (Path(__file__).parents[2] / "packages/h2o-mlxlm/README.md").read_text()
    (line,) = [line for line in readme.splitlines() if line.startswith("mlx.distributed_config")]
    options = [word for word in line.split() if word.startswith("--")]
    assert len(options) == 4
    assert not [option for option in options if option not in usage]
