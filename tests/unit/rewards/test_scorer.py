"""User hooks here really hang, raise, exit and crash."""

import os
from pathlib import Path

import pytest

from rlctl.config.schema import RewardSection
from rlctl.rewards.base import Item, RewardError
from rlctl.rewards.scorer import Scorer

HOOKS = '''
import ctypes, os, re, time

def behave(prompt, completion, answer, row):
    """What `completion` says."""
    if completion == "raise":
        raise ZeroDivisionError("no such luck")
    if completion == "hang":
        time.sleep(60)
    if completion == "hang in C":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if completion == "exit":
        os._exit(3)
    if completion == "crash":
        ctypes.string_at(0)
    if completion == "print":
        print("hello from the hook")
    if completion == "text":
        return "one"
    if completion == "nan":
        return float("nan")
    return row.get("worth", 1.0)

def slow(prompt, completion, answer, row):
    time.sleep(0.05)
    return 1

def process(prompt, completion, answer, row):
    return os.getpid()

def three(prompt, completion, answer):
    return 1.0
'''


@pytest.fixture
def hooks(tmp_path: Path, monkeypatch) -> Path:
    (tmp_path / "my_rewards.py").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def section(name: str, weight: float = 1.0, timeout_s: float = 0.5, pattern: str | None = None) -> RewardSection:
    return RewardSection(name, weight, pattern, timeout_s)


def items(*completions: str, answer: str | None = "19") -> list[Item]:
    return [Item("12+7=", completion, answer, {}) for completion in completions]


@pytest.mark.parametrize("name", ["my_rewards:behave", "my_rewards.py:behave"])
def test_a_hook_is_found_by_module_and_by_path(hooks, name):
    with Scorer([section(name)]) as scorer:
        score = scorer.score([Item("p", "fine", None, {"worth": 0.25})])[0]
    assert (score.value, score.parts, score.failed) == (0.25, {name: 0.25}, None)


@pytest.mark.parametrize(
    ("completion", "kind"),
    [
        ("raise", "raised ZeroDivisionError: no such luck"),
        ("hang", "took longer than 0.5 s"),
        ("hang in C", "took longer than 0.5 s"),
        ("exit", "ended its process: exit code 3"),
        ("crash", "ended its process: SIGSEGV"),
        ("text", "no finite number: returned 'one'"),
        ("nan", "no finite number: returned nan"),
    ],
)
def test_a_reward_that_fails_costs_that_rollout_alone(hooks, completion, kind):
    with Scorer([section("my_rewards:behave")]) as scorer:
        scores = scorer.score(items("fine", completion, "fine"))
    assert [score.value for score in scores] == [1.0, None, 1.0]
    assert scores[1].failed == f"my_rewards:behave: {kind}"
    assert [score.right for score in scores] == [True, False, True]


def test_failures_are_counted_by_kind_and_the_first_reason_of_each_is_kept(hooks):
    with Scorer([section("my_rewards:behave")]) as scorer:
        scorer.score(items("text", "nan", "exit", "raise"))
        scorer.score(items("nan"))
    assert scorer.failures == {
        "my_rewards:behave: no finite number": 3,
        "my_rewards:behave: ended its process": 1,
        "my_rewards:behave: raised ZeroDivisionError": 1,
    }
    assert (
        scorer.reasons["my_rewards:behave: no finite number"] == "my_rewards:behave: no finite number: returned 'one'"
    )


def test_the_value_is_the_weighted_sum_and_right_means_all_of_the_weight(hooks):
    with Scorer([section("exact", weight=2.0), section("my_rewards:behave", weight=0.5)]) as scorer:
        scores = scorer.score(items("19", "20"))
    assert [(score.value, score.right) for score in scores] == [(2.5, True), (0.5, False)]
    assert scores[1].parts == {"exact": 0.0, "my_rewards:behave": 1.0}


def test_two_rewards_of_one_name_keep_their_parts_apart(hooks):
    two = [section("regex", pattern="a(.)"), section("regex", pattern="b(.)")]
    with Scorer(two) as scorer:
        assert scorer.score(items("a1", answer="1"))[0].parts == {"regex": 1.0, "regex-2": 0.0}


def test_a_pattern_that_backtracks_for_ever_costs_that_rollout(hooks):
    with Scorer([section("regex", pattern="^(a+)+$")]) as scorer:
        scores = scorer.score(items("a" * 40 + "b", "a", answer="a"))
    assert [score.value for score in scores] == [None, 1.0]


def test_many_items_keep_their_order_over_several_workers(hooks):
    batch = [Item("p", "fine", None, {"worth": float(n)}) for n in range(500)]
    with Scorer([section("my_rewards:behave")]) as scorer:
        assert [score.value for score in scorer.score(batch)] == list(map(float, range(500)))


def test_exact_alone_starts_no_process():
    with Scorer([section("exact")]) as scorer:
        scorer.score(items("19") * 512)
        assert all(worker.pid is None for worker in scorer.workers)


def test_a_worker_is_kept_from_batch_to_batch_and_gone_after_close(hooks):
    with Scorer([section("my_rewards:process")]) as scorer:
        first, second = (scorer.score(items("fine"))[0].value for _ in range(2))
    assert first == second
    with pytest.raises(ProcessLookupError):
        os.kill(int(first or 0), 0)


def test_what_a_hook_prints_goes_to_the_log(hooks):
    with Scorer([section("my_rewards:behave")], log=hooks / "rewards.log") as scorer:
        assert scorer.score(items("print"))[0].value == 1.0
    assert (hooks / "rewards.log").read_text() == "hello from the hook\n"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere:score", "nowhere:score: cannot import: ModuleNotFoundError: No module named 'nowhere'"),
        ("nowhere.py:score", "nowhere.py:score: cannot import: FileNotFoundError"),
        ("my_rewards:absent", "my_rewards:absent: no such function: my_rewards has no 'absent'"),
        ("my_rewards:three", "my_rewards:three: wrong signature: it must take (prompt, completion, answer, row)"),
        ("exactly", "exactly: no such reward: use exact, regex, math_verify, or a function of yours"),
    ],
)
def test_a_hook_that_cannot_be_used_is_one_clear_line_before_the_run(hooks, name, complaint):
    with Scorer([section(name)]) as scorer, pytest.raises(RewardError) as error:
        scorer.try_on_sample(items("fine")[0])
    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("completion", ["raise", "hang", "exit", "text"])
def test_a_hook_that_fails_on_the_sample_is_refused(hooks, completion):
    with Scorer([section("my_rewards:behave")]) as scorer, pytest.raises(RewardError, match="my_rewards:behave: "):
        scorer.try_on_sample(items(completion)[0])


def test_every_reward_that_is_no_use_has_its_line(hooks):
    both = [section("nowhere:score"), section("exactly")]
    with Scorer(both) as scorer, pytest.raises(RewardError) as error:
        scorer.try_on_sample(items("fine")[0])
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == ["nowhere:score", "exactly"]


def test_a_sample_that_works_gives_its_score(hooks):
    with Scorer([section("exact"), section("my_rewards:behave")]) as scorer:
        assert scorer.try_on_sample(items("19")[0]).value == 2.0


def test_a_hook_that_breaks_during_the_run_costs_rollouts_and_not_the_run(hooks):
    with Scorer([section("my_rewards:behave")]) as scorer:
        assert scorer.score(items("fine"))[0].value == 1.0
        (hooks / "my_rewards.py").write_text("syntax error")
        scores = scorer.score(items("exit", "fine"))
    assert scores[0].failed == "my_rewards:behave: ended its process: exit code 3"
    assert "cannot import: SyntaxError" in (scores[1].failed or "")
