"""Environments of other projects train two steps. Servers of packages run in their virtual environments."""

import json
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

from rlctl.environments.shelves.harbor import read_rows
from rlctl.utils.ports import free_port
from tests.faults.runs import WITHOUT_VLLM, Run
from tests.system.shelf_packages import TASKSET, block_of_page, install, running
from tests.unit.environments.shelves.test_harbor import TASKS
from tests.unit.sandbox.kinds import local_sandbox

TWO_STEPS = ("grpo.num_steps=2", "grpo.num_prompts_per_step=8", "validation.every=0")


def answers(url: str) -> bool:
    try:
        return bool(urlopen(url, timeout=5).status == 200)
    except (URLError, OSError):
        return False


@pytest.mark.long  # installs the package: half a minute
def test_a_server_of_openenv_trains_two_steps(tmp_path: Path) -> None:
    python = install(tmp_path / "openenv", "openenv==0.10.*")
    port = free_port()
    (tmp_path / "server.py").write_text(block_of_page("server.py").replace("port=8000", f"port={port}"))
    (tmp_path / "mine.yaml").write_text(block_of_page("mine.yaml").replace("8000", str(port)))
    url = f"http://127.0.0.1:{port}"
    with running([str(python), "server.py"], tmp_path, lambda: answers(f"{url}/health")):
        run = Run(tmp_path, "openenv", "mine.yaml", WITHOUT_VLLM, *TWO_STEPS)
        assert run.end() == 0, run.text()
    assert [step["step"] for step in run.steps()] == [1, 2]
    for step in run.steps():
        assert step["environment/failed"] == 0 and 1 <= step["environment/turns"] <= 5
        assert step["mismatch/token_mult_prob_error"] < 1.001
    assert 0 < sum(step["reward/mean"] for step in run.steps()) < 2


@pytest.mark.long  # installs the package: half a minute
def test_a_taskset_of_verifiers_trains_two_steps(tmp_path: Path) -> None:
    python = install(tmp_path / "verifiers", "verifiers==0.4.*")
    port = str(free_port())
    (tmp_path / "my_taskset.py").write_text(TASKSET)
    (tmp_path / "serve.py").write_text(block_of_page("serve.py").replace("5000", port))
    (tmp_path / "mine.yaml").write_text(block_of_page("agent.yaml").replace("5000", port))
    with running([str(python), "serve.py"], tmp_path, (tmp_path / "tasks.jsonl").exists):
        run = Run(tmp_path, "verifiers", "mine.yaml", WITHOUT_VLLM, *TWO_STEPS)
        assert run.end() == 0, run.text()
    assert [step["step"] for step in run.steps()] == [1, 2]
    for step in run.steps():
        assert step["environment/failed"] == 0 and 1 <= step["environment/turns"] <= 5
        assert step["agent/rows_per_episode"] == 1
        assert step["mismatch/token_mult_prob_error"] < 1.001
    assert 0 < sum(step["reward/won/mean"] for step in run.steps()) < 2


@pytest.mark.long  # tests/unit/environments/shelves has its parts
def test_a_task_folder_of_harbor_trains_two_steps(tmp_path: Path) -> None:
    local_sandbox("bwrap")
    rows = [json.dumps(row) for row, _ in read_rows(TASKS) if row]
    (tmp_path / "tasks.jsonl").write_text("\n".join(rows * 8))
    (tmp_path / "harbor.yaml").write_text(
        "defaults: calculator-tiny\ndata: {train: {path: tasks.jsonl}}\nenvironment: {name: harbor, max_turns: 2}\n"
    )
    run = Run(tmp_path, "harbor", "harbor.yaml", WITHOUT_VLLM, *TWO_STEPS)
    assert run.end() == 0, run.text()
    # The tiny model knows another tool, and solves no task: what it does is valued all the same.
    assert [(step["step"], step["environment/failed"], step["reward/mean"]) for step in run.steps()] == [
        (1, 0, 0),
        (2, 0, 0),
    ]
