"""Several machines, as three ranks on this one: each evicts for its own heads, and the text is that of one rank."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import MODELS
from .ranks import SETTINGS

HERE = Path(__file__).parent
# Tokens of the prompt and new ones. The ranks wait for one another 60 times a token with SmolLM2.
LENGTHS = {"mistral": (60, 24), "smollm2": (40, 4)}
TIE = 1e-3  # in nats: sums over ranks differ from sums over one in their last bits


def run(launcher, name, n_prompt, n_new):
    """What each rank prints, by rank."""
    prompt = [str(300 + 7 * i % 200) for i in range(n_prompt)]
    command = [*launcher, str(HERE / "ranks.py"), MODELS[name] or name, str(n_new), *prompt]
    # Three ranks and each with as many threads as there are cores would wait for each other.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    ranks = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return sorted(ranks, key=lambda rank: rank["rank"])


@pytest.mark.parametrize("name", LENGTHS)
def test_three_ranks_write_what_one_writes(name):
    n_prompt, n_new = LENGTHS[name]
    launch = [str(Path(sys.executable).with_name("mlx.launch")), "-n", "3", "--backend", "ring"]
    ranks = run([*launch, "--python", sys.executable], name, n_prompt, n_new)
    (alone,) = run([sys.executable], name, n_prompt, n_new)
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    for rank in ranks:
        assert all(evicted == n_prompt + n_new - SETTINGS["budget"] > 0 for evicted in rank["evictions"])
        for (token, _), (expected, gap) in zip(rank["steps"], alone["steps"], strict=True):
            if token != expected:
                assert gap < TIE, f"{token} where one rank writes {expected}, {gap} nats ahead"
                return  # from a near-tie on the texts may differ
    # Each rank has one of the three KV heads, and keeps in it what one rank keeps there.
    for layer, heads in enumerate(alone["kept"]):
        assert [rank["kept"][layer][0] for rank in ranks] == heads
