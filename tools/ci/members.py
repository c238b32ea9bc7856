"""Print the workspace's members as JSON, for the matrix of the workflow and for ``.ci/run``."""

import json
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def project(folder: str | Path = ".") -> dict[str, Any]:
    """Read the pyproject.toml of a folder of the workspace."""
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def members() -> dict[str, str]:
    """Name each member, with its folder, in the order of the workspace's list."""
    folders = project()["tool"]["uv"]["workspace"]["members"]
    return {project(folder)["project"]["name"]: folder for folder in folders}


if __name__ == "__main__":
    print(json.dumps(list(members())))
