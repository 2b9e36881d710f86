"""A task folder of Harbor runs on the sandbox as it is, or is refused with the reason. Its tests value the episode."""

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.environments.contract import read_contract
from rlctl.environments.outcomes import InfrastructureError
from rlctl.environments.shelves.harbor import Harbor, read_rows
from rlctl.environments.shelves.harbor_folder import RefusedTaskError, read_task
from tests.unit.sandbox.kinds import local_sandbox

TASKS = Path(__file__).parent / "harbor_tasks"
SORT = TASKS / "sort-numbers"
needs_bwrap = pytest.mark.usefixtures("bwrap")


@pytest.fixture
def bwrap() -> None:
    local_sandbox("bwrap")


@pytest.fixture
def task(tmp_path: Path) -> Path:
    """Return a copy of a task that runs."""
    return shutil.copytree(SORT, tmp_path / "sort")


@pytest.fixture
def episode(task: Path, bwrap: None) -> Iterator[Harbor]:
    episode = Harbor()
    instruction = episode.reset(str(task))
    assert instruction is not None and instruction.startswith("Sort the numbers")
    yield episode
    episode.close()


def test_the_class_has_one_tool() -> None:
    contract = read_contract(Harbor, {})
    assert contract.problems == contract.notes == []
    assert [tool["function"]["name"] for tool in contract.tools] == ["bash"]


@needs_bwrap
def test_of_two_task_folders_one_runs_and_one_is_refused() -> None:
    (_, refusal), (row, no_refusal) = read_rows(TASKS)
    assert row == {"prompt": (SORT / "instruction.md").read_text(), "task": str(SORT)} and no_refusal == ""
    assert refusal.startswith("needs-packages/environment/Dockerfile:5: RUN apt-get update")
    assert refusal.endswith("the sandbox stands for one FROM, COPY and WORKDIR alone")


def test_a_shell_keeps_files_and_the_tests_value_them(episode: Harbor) -> None:
    assert episode.bash("pwd; ls; cat /tests/expected.txt") == (
        "/app\nnumbers.txt\ncat: /tests/expected.txt: No such file or directory\n\n[exit code 1]"
    )
    assert episode.get_reward() == 0.0
    assert episode.bash("sort -n numbers.txt > sorted.txt") == ""
    assert episode.get_reward() == 1.0
    # The shelf's own folder takes nothing that the model wrote.
    cheat = "mkdir -p logs/verifier; rm /app/sorted.txt; echo 9 > logs/verifier/reward.txt; ln -s /etc/passwd tests"
    episode.bash(f"cd ~; rm -rf tests logs; {cheat}")
    assert episode.get_reward() == 0.0


def test_a_command_ends_at_its_limit(task: Path, bwrap: None) -> None:
    episode = Harbor(command_s=0.3)
    episode.reset(str(task))
    assert episode.bash("sleep 60") == "\n[ended at the limit: wall_time]"
    episode.close()


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("exit 0", "wrote no reward .*"),
        ("echo well > /logs/verifier/reward.txt", "wrote no reward .*could not convert"),
        ("echo nan > /logs/verifier/reward.txt", "no finite number"),
        ("""echo '{"speed": 1}' > /logs/verifier/reward.json""", "wrote no reward .*'reward'"),
        ("sleep 60", "ended at the limit: wall_time"),
    ],
)
def test_tests_without_a_reward_are_a_failure(episode: Harbor, task: Path, script: str, reason: str) -> None:
    (task / "tests/test.sh").write_text(script)
    (task / "task.toml").write_text("[verifier]\ntimeout_sec = 0.5\n")
    episode.reset(str(task))
    with pytest.raises(InfrastructureError, match=reason):
        episode.get_reward()


def test_one_of_several_rewards_is_the_tasks(task: Path, bwrap: None) -> None:
    rewards = json.dumps({"speed": 0.25, "reward": 1})
    (task / "tests/test.sh").write_text(f"echo '{rewards}' > /logs/verifier/reward.json")
    episode = Harbor(reward_key="speed")
    episode.reset(str(task))
    assert episode.get_reward() == 0.25
    episode.close()


@needs_bwrap
def test_a_task_whose_own_solution_fails_here_is_refused(task: Path) -> None:
    (task / "solution/solve.sh").write_text("exit 1")
    assert list(read_rows(task)) == [({}, "sort: its own solution is worth 0, and its untouched files 0")]


@pytest.fixture
def command(tmp_path: Path, bwrap: None) -> str:
    """Return the command of containers. Their image has a file that the Dockerfile cannot show."""
    (tmp_path / "images/harbor-sort/app").mkdir(parents=True)
    (tmp_path / "images/harbor-sort/app/numbers.txt").write_text("3\n1\n")
    client = Path(__file__).with_name("container.py")
    return f"{sys.executable} {client} {tmp_path}/images --volume={{mount}} {{image}}"


def test_a_task_with_any_dockerfile_runs_by_a_command(task: Path, command: str) -> None:
    (task / "environment/Dockerfile").write_text("FROM alpine:3\nRUN seq 3 > /app/numbers.txt\nWORKDIR /app\n")
    (task / "tests/expected.txt").write_text("1\n3\n")
    assert list(read_rows(task)) == [
        ({}, "sort/environment/Dockerfile:1: alpine:3: this machine stands for ubuntu, debian, python")
    ]
    ((row, refusal),) = read_rows(task, command=command)
    assert (row["task"], refusal) == (str(task), "")
    episode = Harbor(command=command)
    episode.reset(str(task))
    assert episode.bash("pwd; sort -n numbers.txt > sorted.txt; touch /gone") == "/app\n"
    assert episode.bash("ls; ls /gone 2> /dev/null") == "numbers.txt\nsorted.txt\n\n[exit code 2]"
    assert episode.get_reward() == 1.0
    episode.close()


def test_an_image_that_is_not_there_fails_the_episode(task: Path, command: str) -> None:
    episode = Harbor(command=command, image_prefix="other-")
    with pytest.raises(InfrastructureError, match="/app of the image other-sort cannot be copied"):
        episode.reset(str(task))
    episode.close()
    for wrong, reason in (
        ("docker run {image}", "no {mount}"),
        ("docker {mount}", "no {image}"),
        ("x {y}", "{y} is none"),
    ):
        with pytest.raises(InfrastructureError, match=reason):
            Harbor(command=wrong).reset(str(task))


@pytest.mark.parametrize(
    ("file", "text", "reason"),
    [
        ("environment/Dockerfile", "FROM alpine:3", "sort/environment/Dockerfile:1: alpine:3: this machine stands for"),
        ("environment/Dockerfile", "FROM python:3.7-slim", "python:3.7-slim: the sandbox has Python 3."),
        ("environment/Dockerfile", "FROM debian\nENV A=1", "Dockerfile:2: ENV A=1: the sandbox stands for"),
        (
            "environment/Dockerfile",
            "FROM debian\nWORKDIR /app\nCOPY a .",
            "Dockerfile:3: there is no a in environment/",
        ),
        ("environment/Dockerfile", "FROM debian\nCOPY --from=x /a /b", "Dockerfile:2: COPY --from=x"),
        ("environment/Dockerfile", "FROM debian", "sort works in /: WORKDIR and COPY need a folder of the task's own"),
        ("environment/Dockerfile", "FROM debian\nWORKDIR /usr/src", "sort works in /usr/src: WORKDIR and COPY need"),
        ("environment/compose.yaml", "", "sort/environment/compose.yaml: a task of several containers"),
        ("tests/Dockerfile", "FROM debian", "sort/tests/Dockerfile: the tests need an image of their own"),
        ("tests/test.sh", "x\npip install pytest", "sort/tests/test.sh:2: pip needs a network"),
        ("task.toml", "schema_version = '2.0'", "sort/task.toml: schema_version 2.0: this shelf reads 1.x"),
        ("task.toml", "[environment]\ngpus = 1", "sort/task.toml: [environment] gpus: the sandbox has none"),
        ("task.toml", "[environment]\nos = 'windows'", "[environment] os is windows, and the sandbox is Linux"),
        ("task.toml", "[agent]\nnetwork_mode = 'public'", "[agent] asks for a network, and the sandbox has none"),
        ("task.toml", "[verifier]\nenvironment_mode = 'separate'", "the tests need an image of their own"),
        (
            "task.toml",
            "[environment.env]\nKEY = '${KEY}'",
            "[environment.env] KEY: ${KEY} is a variable of",
        ),
        ("task.toml", "[[steps]]\nname = 'a'", "sort/task.toml: steps: a task of several steps"),
        ("task.toml", "x =", "sort/task.toml: Invalid value"),
    ],
)
def test_a_folder_that_the_sandbox_cannot_stand_for_is_refused(task: Path, file: str, text: str, reason: str) -> None:
    (task / file).write_text(text)
    with pytest.raises(RefusedTaskError) as refused:
        read_task(task)
    assert reason in str(refused.value)


def test_files_are_copied_as_docker_copies_them(task: Path, bwrap: None) -> None:
    context = task / "environment"
    (context / "data").mkdir()
    (context / "data/a.txt").write_text("a")
    (context / "run.sh").write_text("echo ran")
    (context / "run.sh").chmod(0o755)
    copies = "WORKDIR /srv\nWORKDIR app\nCOPY data/ in/\nCOPY *.txt run.sh ./\nCOPY numbers.txt /opt/n.txt\nCOPY . /all"
    (context / "Dockerfile").write_text(f"FROM debian:12\n{copies}")
    read = read_task(task)
    assert (read.workdir, read.roots) == ("/srv/app", ["/all", "/opt", "/srv/app"])
    episode = Harbor()
    episode.reset(str(task))
    found = episode.bash("find . /opt /all -type f | sort; ./run.sh")
    episode.close()
    own_files = ["./in/a.txt", "./numbers.txt", "./run.sh"]
    all_files = ["/all/data/a.txt", "/all/numbers.txt", "/all/run.sh"]
    assert found.split() == [*sorted([*own_files, *all_files, "/opt/n.txt"]), "ran"]
