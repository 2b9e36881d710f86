"""Coroutine rewards: many at once in one process, each with its own timeout; hangs, crashes and foreign replies."""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlctl.config.grpo_schema import RewardSection
from rlctl.rewards.base import RewardError, RewardInput
from rlctl.rewards.load_rewards import load_reward
from rlctl.rewards.scorer import Score, Scorer

HOOKS = r'''
import asyncio, json, os, re, signal, time

running = 0
most = 0
background = []

async def waits(prompt, completion, answer, row):
    """As a judge that answers after `seconds`."""
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(row["seconds"])
    running -= 1
    return row["worth"]

async def most_at_once(prompt, completion, answer, row):
    await waits(prompt, completion, answer, row)
    return float(most)

async def behaves(prompt, completion, answer, row):
    """Do as `completion` says, after others have begun."""
    await asyncio.sleep(0.2)
    if completion == "raise":
        raise ZeroDivisionError("no such luck")
    if completion == "hang":
        await asyncio.sleep(600)
    if completion == "swallow":
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                pass
    if completion == "block":
        time.sleep(600)
    if completion == "block in C":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if completion == "block in a task":
        async def blocks():
            time.sleep(600)
        await asyncio.gather(blocks())
    if completion == "exit":
        os._exit(3)
    if completion == "sys.exit":
        raise SystemExit(4)
    if completion == "foreign reply":
        for number in range(3, 1000):
            try:
                os.write(number, json.dumps({"ticket": 7, "outcomes": [{"value": 9.0}], "counts": {}}).encode() + b"\n")
            except OSError:
                pass
    if completion == "terminate" and not os.path.exists("done"):
        open("done", "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(600)
    if completion == "text":
        return "one"
    return row["worth"]

async def late(prompt, completion, answer, row):
    """A reply of the item before comes while this one waits."""
    try:
        await asyncio.sleep(row["seconds"])
    except asyncio.CancelledError:
        await asyncio.sleep(0.3)
    return row["worth"]

async def best(group):
    """1 for the longest completion of the task."""
    await asyncio.sleep(0.01)
    longest = max(len(rollout.completion) for rollout in group)
    if longest == 0:
        raise ValueError("nobody answered")
    if longest == 1:
        return [None for _ in group]
    if longest == 2:
        return [1.0]
    return [float(len(rollout.completion) == longest) for rollout in group]

async def in_trl(prompts, completions, worth, **columns):
    await asyncio.sleep(0.2)
    return worth

async def in_verl(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.2)
    return {"score": float(solution_str == ground_truth)}

def plain(group):
    return [1.0 for _ in group]
'''


@pytest.fixture(autouse=True)
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "hooks.py").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@contextlib.contextmanager
def scorer_of(name: str, timeout_s: float = 60.0, concurrency: int = 64) -> Iterator[Scorer]:
    with Scorer([RewardSection(f"hooks.py:{name}", 1.0, None, None, timeout_s, concurrency)]) as scorer:
        yield scorer


def make_items(*completions: str, seconds: float = 0.0) -> list[RewardInput]:
    """Return one item for each completion. The worth of an item is its place."""
    return [
        RewardInput("p", completion, "answer", {"worth": float(place), "seconds": seconds, "data_source": "s"})
        for place, completion in enumerate(completions)
    ]


def values_of(scores: list[Score]) -> list[float | None]:
    return [score.value for score in scores]


def test_64_rollouts_are_awaited_at_once() -> None:
    items = make_items(*["x"] * 128, seconds=0.5)
    with scorer_of("waits") as scorer:
        scorer.try_on_sample(items[0])
        began = time.monotonic()
        assert values_of(scorer.score(items)) == [float(place) for place in range(128)]
        # One at a time they would take 64 s.
        assert time.monotonic() - began < 8


def test_no_more_calls_run_at_once_than_the_concurrency() -> None:
    with scorer_of("most_at_once", concurrency=5) as scorer:
        assert max(filter(None, values_of(scorer.score(make_items(*["x"] * 20, seconds=0.05))))) == 5.0


@pytest.mark.parametrize("name", ["in_trl", "in_verl"])
def test_the_forms_of_trl_and_verl_run_at_once_too(name: str) -> None:
    items = make_items(*["answer"] * 40)
    with scorer_of(name) as scorer:
        scorer.try_on_sample(items[0])
        began = time.monotonic()
        expected = [float(place) for place in range(40)] if name == "in_trl" else [1.0] * 40
        assert values_of(scorer.score(items)) == expected
        assert time.monotonic() - began < 4


def test_a_coroutine_that_fails_costs_its_own_rollout() -> None:
    failures = {
        "raise": f"behaves: raised ZeroDivisionError at {line_of('no such luck')}: no such luck",
        "hang": "behaves: took longer than 1 s",
        "swallow": "behaves: took longer than 1 s",
        "sys.exit": f"behaves: raised SystemExit at {line_of('SystemExit(4)')}: 4",
        "text": f"behaves: no finite number at {line_of('async def behaves')}: returned 'one'",
    }
    check_that_only_these_fail(failures)


def test_a_coroutine_that_blocks_the_loop_or_ends_the_process_costs_its_own_rollout() -> None:
    failures = {
        "block": "behaves: took longer than 1 s",
        "block in C": "behaves: took longer than 1 s",
        "block in a task": "behaves: took longer than 1 s",
        "exit": "behaves: ended its process: exit code 3",
    }
    check_that_only_these_fail(failures)


def check_that_only_these_fail(failures: dict[str, str]) -> None:
    """Score each completion of `failures` among others, all at once."""
    completions = ["fine"]
    for completion in failures:
        completions += [completion, "fine"]
    with scorer_of("behaves", timeout_s=1.0) as scorer:
        scores = scorer.score(make_items(*completions))
    expected = [None if text in failures else float(place) for place, text in enumerate(completions)]
    assert values_of(scores) == expected
    assert {text: score.failed for text, score in zip(completions, scores) if text in failures} == failures


def line_of(text: str) -> str:
    """Return file:line of the first line of the hooks with this text."""
    lines = HOOKS.split("\n")
    return f"hooks.py:{next(number for number, line in enumerate(lines, 1) if text in line)}"


def test_a_terminated_call_is_made_again() -> None:
    with scorer_of("behaves") as scorer:
        assert values_of(scorer.score(make_items("fine", "terminate", "fine"))) == [0.0, 1.0, 2.0]


def test_a_foreign_reply_reaches_no_rollout() -> None:
    with scorer_of("behaves") as scorer:
        scores = scorer.score(make_items("fine", "foreign reply", "fine"))
        # Who wrote it is not known, so every call is made once more, and then fails.
        assert 9.0 not in values_of(scores)
        assert {score.failed for score in scores if score.failed} <= {
            "behaves: wrote to a file descriptor that is not its own: a reply to no call in flight"
        }
        assert values_of(scorer.score(make_items("fine", "fine"))) == [0.0, 1.0]


def test_an_outcome_that_comes_late_is_never_another_rollouts() -> None:
    with scorer_of("late", timeout_s=1.0, concurrency=1) as scorer:
        slow = make_items("a", seconds=600.0)
        fast = [RewardInput("p", "b", None, {"worth": 5.0, "seconds": 0.6})] * 3
        scores = scorer.score(slow + fast)
    assert [score.failed for score in scores[:1]] == ["late: took longer than 1 s"]
    assert values_of(scores[1:]) == [5.0, 5.0, 5.0]


def test_a_group_is_judged_together() -> None:
    completions = ["ab", "abc", "ab", "abcd", "", "", "a", "", "ab", "ab"]
    with scorer_of("best") as scorer:
        scores = scorer.score(make_items(*completions), group_sizes=[2, 2, 2, 0, 2, 2])
    assert values_of(scores) == [0.0, 1.0, 0.0, 1.0, None, None, None, None, None, None]
    assert scores[4].failed == f"best: raised ValueError at {line_of('nobody answered')}: nobody answered"
    assert scores[6].failed == "best: no reward judges it: each returned None"
    assert scores[8].failed is not None and "returned 1 values for 2 rollouts" in scores[8].failed


def test_a_plain_function_of_a_group_is_refused() -> None:
    with pytest.raises(RewardError, match=r"takes a group and is no coroutine at hooks\.py:.*: write async def"):
        load_reward(RewardSection("hooks.py:plain", 1.0, None, None, 5.0, 64))


def test_a_coroutine_works_in_an_event_loop_of_the_caller() -> None:
    """The form is read from the function, and its call returns an awaitable."""
    reward = load_reward(RewardSection("hooks.py:in_trl", 1.0, None, None, 5.0, 64))
    assert reward.form == "coroutine"
    assert asyncio.run(reward.call(make_items("a", "b")[1])) == 1.0
