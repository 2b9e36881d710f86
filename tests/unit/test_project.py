"""Files about the project agree with it: versions, changelog, workflows, templates, the design's loop."""

import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlctl.grpo.loop import GrpoLoop

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
MOST_WORDS = 1500
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")
# Fields of a form, of which GitHub wants those of `required`: its schema of issue forms.
FORM_KEYS = {"name", "description", "labels", "body"}
FIELD_KEYS = {"textarea": {"id", "type", "attributes", "validations"}, "checkboxes": {"id", "type", "attributes"}}


def load_yaml(path: Path) -> dict[str, Any]:
    values = yaml.safe_load(path.read_text())
    assert isinstance(values, dict)
    return values


def exists(command: str) -> bool:
    """Return True if a step's command is a script of the repository, a target of make, or a test of the shell."""
    words = command.split()
    if words[0] == "make":
        return re.search(rf"(?m)^{words[1]}:", (ROOT / "Makefile").read_text()) is not None
    return words[0] == "test" or (ROOT / words[0]).is_file()


def test_one_version_stands_everywhere() -> None:
    assert load_yaml(ROOT / "CITATION.cff")["version"] == PROJECT["version"]
    newest = re.search(r"(?m)^## (\S+) - (.*)$", CHANGELOG)
    assert newest and newest[1] == PROJECT["version"]


def test_the_changelog_is_short_and_dates_each_entry() -> None:
    assert len(CHANGELOG.split()) <= MOST_WORDS
    entries = re.findall(r"(?m)^- .*(?:\n  .*)*", CHANGELOG)
    assert len(entries) > 50
    assert [entry for entry in entries if not re.search(r"\(\d\d(, \d\d)*\)", entry)] == []


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_commands_that_exist_with_few_rights(path: Path) -> None:
    workflow = load_yaml(path)
    # YAML 1.1 reads the key `on` as True.
    assert workflow[True]
    assert workflow["permissions"] == {"contents": "read"}
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert steps[0]["uses"].startswith("actions/checkout@")
    commands = [step["run"] for step in steps if "run" in step]
    assert commands and all(map(exists, commands))
    assert all(job["timeout-minutes"] and job["runs-on"] for job in workflow["jobs"].values())


def test_workflows_run_on_their_events() -> None:
    events = {path.stem: load_yaml(path)[True] for path in WORKFLOWS}
    assert set(events["quick"]) == {"pull_request"}
    assert events["test"]["push"] == {"branches": ["main"]}
    assert events["release"] == {"push": {"tags": ["v*"]}}


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_a_form_has_the_keys_that_github_reads(path: Path) -> None:
    form = load_yaml(path)
    assert form.keys() == FORM_KEYS
    for field in form["body"]:
        assert field.keys() <= FIELD_KEYS[field["type"]]
        assert field["attributes"]["label"]
    names = [field["id"] for field in form["body"]]
    assert len(set(names)) == len(names)


def test_hooks_before_a_commit_name_tools_and_files_that_exist() -> None:
    (repository,) = load_yaml(ROOT / ".pre-commit-config.yaml")["repos"]
    tools = PROJECT["optional-dependencies"]["dev"]
    for hook in repository["hooks"]:
        tool, *arguments = hook["entry"].split()
        name = tool.removeprefix(".venv/bin/")
        assert name == "python" or any(requirement.startswith(name) for requirement in tools)
        assert all((ROOT / argument).is_file() for argument in arguments if argument.endswith(".py"))


def test_the_loop_of_the_design_is_that_of_the_code() -> None:
    (block,) = re.findall(r"(?s)```python\n(.*?)```", (ROOT / "rlctl/DESIGN.md").read_text())
    # A search in an iterator goes on behind the line that it found: the order counts.
    lines_of_code = iter([line.strip() for line in inspect.getsource(GrpoLoop.step).splitlines()])
    missing_lines = [line for line in block.splitlines() if line.strip() not in lines_of_code]
    assert missing_lines == []
