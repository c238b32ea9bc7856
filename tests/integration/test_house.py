"""The rules of the house: what every package has, says and never does."""

import ast
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
ROOT_PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
MEMBERS = {Path(folder).name: ROOT / folder for folder in ROOT_PROJECT["tool"]["uv"]["workspace"]["members"]}
PROJECTS = {name: tomllib.loads((folder / "pyproject.toml").read_text()) for name, folder in MEMBERS.items()}
SOURCES = sorted(path for folder in MEMBERS.values() for path in folder.glob("src/**/*.py"))

# Every shell command of the documents, and what runs it: a part of .ci/run, or a test of a file.
COMMANDS = {
    "pip install uv": ".ci/run: install_uv",
    "pip install uv && uv sync": ".ci/run: install_uv",
    'uv run h2o-mlxlm generate --prompt "Explain photosynthesis, step by step." --budget 64 --max-tokens 200': (
        "tests/integration/test_readme.py: test_its_commands_generate_past_the_budget"
    ),
    'uv run h2o-mlxlm generate --prompt "Explain photosynthesis, step by step." --budget 64 '
    "--budget-shape calibrated-layers --max-tokens 200": (
        "tests/integration/test_readme.py: test_its_commands_generate_past_the_budget"
    ),
    # With a folder in place of the hub's id.
    'h2o-mlxlm generate --model mlx-community/Llama-3.2-3B-Instruct-4bit --prompt "Name three rivers." --budget 512': (
        "packages/h2o-mlxlm/tests/test_cli.py: test_as_a_process_the_text_comes_out_and_the_log_apart"
    ),
    "h2o-mlxlm chat --model mlx-community/Llama-3.2-3B-Instruct-4bit --budget 512": (
        "packages/h2o-mlxlm/tests/test_chat.py: test_on_a_terminal"
    ),
    "h2o-mlxlm server --model mlx-community/Llama-3.2-3B-Instruct-4bit --budget 512 --port 8080": (
        "packages/h2o-mlxlm/tests/test_server.py: test_as_a_process_it_serves_until_interrupted"
    ),
    # Run with a tiny model.
    'h2o-mlxlm cache-prompt --prompt "A long document, and then:" --prompt-cache-file document.safetensors '
    "--budget 512": ("packages/h2o-mlxlm/tests/test_cache_prompt.py: test_the_readmes_commands"),
    'h2o-mlxlm generate --prompt-cache-file document.safetensors --prompt " what does it say?"': (
        "packages/h2o-mlxlm/tests/test_cache_prompt.py: test_the_readmes_commands"
    ),
    "h2o-mlxlm calibrate --model mlx-community/Llama-3.2-3B-Instruct-4bit --out needs": (
        "packages/h2o-mlxlm/tests/test_calibrate.py: test_the_command"
    ),
    "uv run pytest": ".ci/run: test_all",
    # With a folder in place of the hub's ids.
    'H2O_TEST_MODELS="mlx-community/Llama-3.2-1B-Instruct-4bit mlx-community/Mistral-7B-Instruct-v0.3-4bit" '
    "uv run pytest tests/integration": (
        "tests/integration/test_real_models.py: test_models_named_in_the_environment_are_tested_too"
    ),
    # Their options, and a launch with -n 3 in place of the hosts, on one machine.
    "mlx.distributed_config --hosts mac-one.local,mac-two.local --over ethernet --backend ring "
    "--output-hostfile hosts.json": "tests/integration/test_ranks.py: test_the_readmes_options_exist",
    "mlx.launch --hostfile hosts.json --backend ring ours.py": (
        "tests/integration/test_ranks.py: test_three_ranks_write_what_one_writes"
    ),
    # In a short form, on a random model.
    "uv run h2o-mlxlm eval loss --methods recency h2o calibrated-layers calibrated --budgets 64 128 256 --context 1024 "
    "--scored 256 --windows 8 --batch 8 --out /tmp/h2o/loss": ("packages/h2o-mlxlm/tests/test_evaluate.py: test_loss"),
    'h2o-sim compare shift --steps 400 --config "budget=64 grace=16" --config "algorithm-1 budget=64"': (
        "packages/h2o-core/tests/test_cli.py: test_the_readmes_commands"
    ),
    "h2o-sim run recency --steps 400 --budget 64 --n-sink 4 --grace 16 --json": (
        "packages/h2o-core/tests/test_cli.py: test_the_readmes_commands"
    ),
    "h2o-sim generate zipf --steps 256 --out zipf.safetensors": (
        "packages/h2o-core/tests/test_cli.py: test_the_readmes_commands"
    ),
    # On the emulator of Metal, at small sizes; the workflow's macOS job runs the first.
    "uv run tools/kernel_check.py metal": (
        "tests/integration/test_kernel_check.py: test_every_kernel_is_checked_and_timed"
    ),
    "gpu/bin/python tools/kernel_check.py cuda": (
        "tests/integration/test_kernel_check.py: test_every_kernel_is_checked_and_timed"
    ),
    # Without the extra.
    'uv venv gpu && uv pip install --python gpu -e "packages/h2o-mlxlm[cuda13]"': ".ci/run: lowest",
    # Some of the scorers.
    **dict.fromkeys(
        (
            "h2o-sim compare tests/data/smollm2.safetensors --prompt-len 64 --budget 64 --scorers "
            '--config "h2o decay=1.0"',
            'h2o-sim compare shift --steps 400 --prompt-len 64 --budget 64 --scorers --config "h2o decay=1.0"',
        ),
        "packages/h2o-core/tests/test_cli.py: test_the_readmes_tables",
    ),
    ".ci/run lint": ".ci/run: lint",
    ".ci/run member h2o-core": ".ci/run: member",
    # From the wheels just built.
    **{f'pip install "{name}[cpu]"': "tools/ci/wheels.sh: wheel_of" for name in MEMBERS},
}


def sh_commands(text):
    """Commands in the text's ```sh blocks: one a line, without comments, continued lines joined."""
    for block in re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            command = " ".join(line.removeprefix("$ ").split("  #")[0].split())
            if command and not command.startswith("#"):
                yield command


def requirements(name):
    """All requirement lines of a member: [(where, Requirement)]."""
    project = PROJECTS[name]["project"]
    groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
    groups["test"] = PROJECTS[name]["dependency-groups"]["test"]
    return [(group, Requirement(line)) for group, lines in groups.items() for line in lines]


def bounded(requirement, *operators):
    return any(spec.operator in operators for spec in requirement.specifier)


def test_the_workspace_names_every_package():
    assert sorted(MEMBERS) == sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
    assert all(PROJECTS[name]["project"]["name"] == name for name in MEMBERS)


@pytest.mark.parametrize("name", MEMBERS)
def test_a_package_has_what_it_must(name):
    folder, project = MEMBERS[name], PROJECTS[name]["project"]
    for file in ("README.md", "CHANGELOG.md", f"src/{name.replace('-', '_')}/py.typed"):
        assert (folder / file).is_file(), file
    assert list(folder.glob("tests/test_*.py"))
    assert (folder / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert project["license"] == "MIT"
    assert project["requires-python"] == ">=3.11"
    assert {"cpu", "cuda12", "cuda13"} <= set(project["optional-dependencies"])
    assert f"## [{project['version']}]" in (folder / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("name", MEMBERS)
def test_versions_have_bounds(name):
    found = requirements(name)
    floors = {r.name for _, r in found if bounded(r, ">=", "==")}
    assert not {r.name for _, r in found} - floors
    siblings = [r for group, r in found if r.name in MEMBERS and group == "dependencies"]
    assert all(bounded(r, "<", "==") for r in siblings)
    for sibling in siblings:
        assert sibling.specifier.contains(PROJECTS[sibling.name]["project"]["version"])
        # Without it the sibling's mlx has no back end on Linux.
        for extra in ("cpu", "cuda12", "cuda13"):
            assert any(group == extra and r.name == sibling.name and r.extras == {extra} for group, r in found)


@pytest.mark.parametrize("name", MEMBERS)
def test_public_names_are_sorted_and_documented(name):
    module = importlib.import_module(name.replace("-", "_"))
    assert module.__doc__
    assert module.__all__ == sorted(module.__all__)
    for public in module.__all__:
        thing = getattr(module, public)
        # A named tuple's or dataclass's generated docstring is its signature.
        assert not (inspect.getdoc(thing) or f"{public}(").startswith(f"{public}("), public


def test_imports_go_one_way():
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", [ROOT / "pyproject.toml", *(f / "pyproject.toml" for f in MEMBERS.values())], ids=str)
def test_no_registry_is_written_by_hand(path):
    text = path.read_text()
    assert not re.search(r"index-url|\[\[tool\.uv\.index\]\]|find-links|://", text)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_source_file_is_short_and_asserts_nothing(path):
    text = path.read_text()
    assert len(text.splitlines()) <= 300
    # python -O drops them, and a user can't tell one from a bug.
    assert not [node.lineno for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Assert)]


def test_the_matrix_is_the_workspaces_list():
    script = [sys.executable, ROOT / "tools/ci/members.py"]
    printed = subprocess.run(script, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed) == list(MEMBERS)


def test_the_gate_waits_for_every_job():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    gate = jobs.pop("gate")
    assert gate["if"] == "always()"
    assert sorted(gate["needs"]) == sorted(jobs)
    assert not [name for name, job in jobs.items() if "if" in job or job.get("continue-on-error")]


def test_the_workflow_runs_parts_that_exist():
    workflow, script = (ROOT / ".github/workflows/ci.yml").read_text(), (ROOT / ".ci/run").read_text()
    parts = set(re.findall(r"run: \.ci/run (\w+)", workflow))
    assert parts == {"lint", "member", "lowest", "test", "wheels"}
    assert all(re.search(rf"^ +{part}\) ", script, re.MULTILINE) for part in parts)


@pytest.mark.parametrize(
    "document", ["README.md", "CONTRIBUTING.md", *(f"packages/{name}/README.md" for name in MEMBERS)]
)
def test_every_command_of_the_documents_is_run(document):
    unlisted = set(sh_commands((ROOT / document).read_text())) - COMMANDS.keys()
    assert not unlisted, "add them to COMMANDS, with what runs them"


@pytest.mark.parametrize("command", COMMANDS)
def test_what_runs_a_command_exists(command):
    file, name = COMMANDS[command].split(": ")
    assert re.search(rf"^(def )?{name}\(", (ROOT / file).read_text(), re.MULTILINE)
