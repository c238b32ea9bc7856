"""Check, in a member's own environment, that what the member does not ask for can't be imported there.

Called as ``python tools/ci/alone.py NAME`` with the environment's Python.
"""

import re
import sys
from importlib.util import find_spec

from members import members, project

# Not members, but the import law names them too.
OTHERS = ["mlx-lm"]


def asked_for(name: str) -> set[str]:
    """Name what a member needs: dependencies, those of the members among them, and the test group's."""
    known = members()
    wanted, open_names = {name}, [name]
    test = project(known[name])["dependency-groups"]["test"]
    while open_names:
        for line in project(known[open_names.pop()])["project"]["dependencies"]:
            found = _name(line)
            if found in known and found not in wanted:
                open_names.append(found)
            wanted.add(found)
    return wanted | {_name(line) for line in test}


def _name(requirement: str) -> str:
    return re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]


def main(name: str) -> None:
    """Exit with a message if the environment holds too little or too much."""
    wanted = asked_for(name)
    for other in [*members(), *OTHERS]:
        there = find_spec(other.replace("-", "_")) is not None
        if there != (other in wanted):
            sys.exit(f"{name}: {other} is {'' if there else 'not '}importable, and pyproject.toml says otherwise")
    unwanted = [other for other in [*members(), *OTHERS] if other not in wanted]
    print(f"{name} is alone: without {', '.join(unwanted) or 'nothing'}")


if __name__ == "__main__":
    main(*sys.argv[1:])
