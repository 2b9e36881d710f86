"""`rlctl runs rollouts`: the groups that are asked for, readable on a terminal, in a pipe and by a script."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rlctl.dashboard.console import SafeConsole
from rlctl.dashboard.dashboard import render
from rlctl.dashboard.rollout_query import NoSuchGroup, RolloutQuery, follow, select
from rlctl.dashboard.rollout_view import plain, render_group
from rlctl.dashboard.state import read_state
from rlctl.telemetry.rollouts_file import RolloutsFile
from tests.unit.dashboard.synthetic import write_run


def make_rollout(index: int, reward: float | None, text: str = "an answer") -> dict[str, Any]:
    return {
        "index": index,
        "text": [[text, True], ["a tool's word", False], ["the end", True]],
        "tokens": 12,
        "finish": "stop",
        "reward": reward,
        "rewards": {"exact": reward, "form": 0.5},
        "right": None if reward is None else reward > 0.5,
        "failed": "exact: raised ValueError" if reward is None else None,
        "advantage": None if reward is None else reward - 0.5,
        "versions": {"3": 4, "4": 8},
    }


def make_group(task: str, rewards: list[float | None], text: str = "an answer") -> dict[str, Any]:
    rollouts = [make_rollout(index, reward, text) for index, reward in enumerate(rewards)]
    return {"task": task, "prompt": f"the prompt of {task}", "answer": "42", "rollouts": rollouts}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Return a file of rollouts: four steps of two groups, whose rewards rise, and two validations."""
    run = write_run(tmp_path, "a")
    file = RolloutsFile(run.rollouts, 1 << 30, lambda *_, **__: None)
    for step in (1, 2, 3, 4):
        file.outcomes(step, {"trained": []})
        low = make_group(f"e0-r{step}", [0.0, step / 10])
        high = make_group(f"e1-r{step}", [1.0, None], f"says {step}")
        file.groups(step, "train", [{**low, "outcome": "trained"}, {**high, "outcome": "filtered: too easy"}])
        if step % 2 == 0:
            file.groups(step, "validation", [make_group("r7", [1.0])])
    return run.rollouts


def find_groups(path: Path, limit: int = 10, **query: Any) -> list[tuple[int, str]]:
    """Return (step, task) of the groups that a query selects."""
    return [(group["step"], group["task"]) for group in select(path, RolloutQuery(**query), limit).groups]


def test_without_a_question_it_is_the_newest_step(path: Path) -> None:
    assert find_groups(path) == [(4, "e0-r4"), (4, "e1-r4")]
    assert find_groups(path, validation=True) == [(4, "r7")]


def test_steps_tasks_and_text_are_asked_for_together_and_the_newest_stay_where_there_are_more(path: Path) -> None:
    assert find_groups(path, steps=(2, 3)) == [(2, "e0-r2"), (2, "e1-r2"), (3, "e0-r3"), (3, "e1-r3")]
    assert find_groups(path, task="r3") == [(3, "e0-r3"), (3, "e1-r3")]
    assert find_groups(path, task="e1-r3") == [(3, "e1-r3")]
    assert find_groups(path, pattern=re.compile("says [12]")) == [(1, "e1-r1"), (2, "e1-r2")]
    assert find_groups(path, pattern=re.compile("answera tool")) == [(step, f"e0-r{step}") for step in (1, 2, 3, 4)]
    assert find_groups(path, limit=1, steps=(2, 3)) == [(3, "e1-r3")]
    assert find_groups(path, validation=True, task="r7") == [(2, "r7"), (4, "r7")]


def test_the_worst_come_first_and_the_best_over_the_whole_run(path: Path) -> None:
    assert find_groups(path, limit=2, order="worst") == [(1, "e0-r1"), (2, "e0-r2")]
    assert [task for _, task in find_groups(path, limit=4, order="best")] == ["e1-r1", "e1-r2", "e1-r3", "e1-r4"]


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ({"steps": (9, 9)}, "there are those of 1, 2, 3, 4"),
        ({"task": "e9-r9"}, "no group of task e9-r9"),
    ],
)
def test_what_was_not_recorded_is_told_with_what_was(path: Path, query: dict[str, Any], answer: str) -> None:
    with pytest.raises(NoSuchGroup, match=answer):
        select(path, RolloutQuery(**query), 10)


def test_a_run_without_groups_names_the_key(tmp_path: Path) -> None:
    with pytest.raises(NoSuchGroup, match=r"telemetry\.groups_per_step"):
        select(tmp_path / "rollouts.jsonl", RolloutQuery(), 10)


def test_following_yields_the_newest_step_and_what_is_added_until_the_run_ends(path: Path) -> None:
    file = RolloutsFile(path, 1 << 30, lambda *_, **__: None)
    statuses = iter(["running", "running", "done"])

    def add_group_and_read_end() -> bool:
        file.groups(5, "train", [make_group("e0-r5", [0.0])])
        return next(statuses) == "done"

    groups = follow(path, RolloutQuery(), add_group_and_read_end, poll_s=0.0)
    assert {(group["step"], group["task"]) for group in groups} == {(5, "e0-r5")}


@pytest.mark.parametrize("width", [40, 80, 140])
def test_on_a_terminal_rollouts_are_side_by_side_and_no_line_is_wider(path: Path, width: int) -> None:
    console = SafeConsole(width=width, record=True, file=open("/dev/null", "w"), force_terminal=True)  # noqa: SIM115
    (group,) = select(path, RolloutQuery(steps=(3, 3), task="e0-r3"), 1).groups
    console.print(render_group(group, console))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    heads_side_by_side = [line for line in lines if "#0 ✘" in line and "#1 ✘" in line]
    assert bool(heads_side_by_side) == (width >= 80)
    assert sum(line.count("┃ an answer") for line in lines) == 2
    assert not any("┃ a tool" in line for line in lines)


def test_in_a_pipe_each_rollout_is_one_line_of_facts_and_its_text_unwrapped(path: Path) -> None:
    (group,) = select(path, RolloutQuery(steps=(3, 3), task="e1-r3"), 1).groups
    lines = list(plain(group))
    assert lines[0] == "== step 3 · e1-r3 · filtered: too easy · answer 42 · 1 of 2 right · mean reward 1"
    assert lines[2] == ("-- #0 ✔ reward 1 · advantage +0.5 · exact 1 · form 0.5 · 12 tokens · ended · v3 x4 v4 x8")
    assert lines[3:6] == ["┃  says 3", "   a tool's word", "┃  the end"]
    assert "failed: exact: raised ValueError" in lines[6]


def test_nothing_that_was_sampled_reaches_the_terminal_as_an_order(path: Path) -> None:
    hostile = make_group("e0-r1\x1b[2J", [1.0], "\x1b]0;title\x07 \x1b[31m [bold]")
    hostile |= {"step": 1, "purpose": "train"}
    assert "\x1b" not in "\n".join(plain(hostile))
    console = SafeConsole(width=80, record=True, file=open("/dev/null", "w"), color_system=None)  # noqa: SIM115
    console.print(render_group(hostile, console))
    screen = console.export_text()
    assert "\x1b" not in screen and "[bold]" in screen


def test_a_tall_dashboard_shows_the_best_and_the_worst_rollout_of_the_newest_group(path: Path) -> None:
    state = read_state(path.parent, samples=True)
    console = SafeConsole(width=140, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(state, 140, 60))
    screen = console.export_text()
    assert "Rollouts" in screen and "the prompt of r7" in screen and len(screen.splitlines()) <= 60
    console.print(render(state, 140, 30))
    assert "the prompt of r7" not in console.export_text()


def test_ten_million_tokens_open_without_being_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse little of the file. Opening it takes 0.05 s of one core. Parsing the whole file takes half a second."""
    path = tmp_path / "rollouts.jsonl"
    head = '{"kind": "group", "step": %d, "purpose": "train", "task": "e0-r%d", '
    rest = json.dumps(make_group("x", [0.0, 1.0] * 4, "four letters " * 170))[len('{"task": "x", ') :]
    tokens = 8 * 500 * 2500
    assert tokens == 10_000_000
    with path.open("w") as file:
        file.writelines(head % (line // 2, line) + rest + "\n" for line in range(2500))
    assert path.stat().st_size > 4 * tokens
    parsed_lengths = list[int]()
    loads = json.loads
    monkeypatch.setattr(json, "loads", lambda text: parsed_lengths.append(len(text)) or loads(text))
    groups = select(path, RolloutQuery(), 10).groups
    lines = []
    for group in groups:
        lines += plain(group)
    assert 0 < sum(parsed_lengths) < path.stat().st_size / 100
    assert len(groups) == 2 and len(lines) > 20


def make_episode(**changes: Any) -> dict[str, Any]:
    """Return a rollout of an episode. changes: facts of the episode that differ."""
    facts = {
        "turns": 2,
        "ending": "done",
        "tool_calls": 3,
        "tool_errors": 1,
        "environment_s": 0.25,
        "messages": [{"role": "user", "content": "1-9="}, {"role": "assistant", "content": "7"}],
    }
    return {**make_rollout(0, 1.0), "rewards": {"environment": 1.0}, "episode": {**facts, **changes}}


def test_an_episode_tells_turns_ending_tool_calls_and_the_environments_seconds() -> None:
    lines = list(plain({"task": "episode 1", "rollouts": [make_episode()]}))
    assert lines[0] == "== episode 1"
    facts = "2 turns: done · 3 tool calls, 1 failed · environment 0.25s"
    assert lines[1] == f"-- #0 ✔ reward 1 · advantage +0.5 · 12 tokens · {facts} · v3 x4 v4 x8"


def test_an_episode_in_which_control_tokens_were_spelled_says_so() -> None:
    lines = list(plain({"task": "episode 1", "rollouts": [make_episode(spelled=2, unwritten=1)]}))
    notes = "2 control tokens read as text · 1 message left out by the chat template"
    assert f" · 3 tool calls, 1 failed · {notes} · environment 0.25s" in lines[1]


def test_an_episode_that_failed_shows_what_was_said() -> None:
    lines = list(
        plain({"task": "episode 1", "rollouts": [{**make_episode(ending="failed", tool_calls=0), "text": []}]})
    )
    assert lines[2:4] == ["   1-9=", "┃  7"] and "tool" not in lines[1]
