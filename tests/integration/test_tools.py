"""The tools behind the documents run, in a short form."""

import csv
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_kept_positions_of_every_setting(tmp_path):
    out = tmp_path / "kept.csv"
    short = ["--prompt", "80", "--steps", "5", "--layer", "0", "--budget", "32"]
    subprocess.run([sys.executable, ROOT / "tools" / "kept.py", out, *short], check=True)
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    last = [row["setting"] for row in rows if row["last"] == "5"]
    assert {name: last.count(name) for name in last} == {
        "grace 0": 32,
        "grace": 32,
        "grace + decay": 32,
        "default": 32,
    }
