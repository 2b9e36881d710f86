"""Scoring by user hooks that really hang, raise, exit and crash."""

import os
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import chain
from pathlib import Path

import psutil
import pytest

from rlctl.config.grpo_schema import RewardSection
from rlctl.rewards.base import RewardError, RewardInput
from rlctl.rewards.scorer import MAX_NAMES, Scorer
from rlctl.workers.user_logs import MAX_CAUSES

HOOKS = r'''
import ctypes, multiprocessing, os, re, signal, subprocess, sys, time

def behave(prompt, completion, answer, row):
    """Do as `completion` says."""
    if completion == "raise":
        raise ZeroDivisionError("no such luck")
    if completion == "sys.exit":
        sys.exit(4)
    if completion == "hang":
        time.sleep(600)
    if completion == "hang in C":
        re.match(r"(a+)+$", "a" * 40 + "b")
    if completion == "exit":
        os._exit(3)
    if completion == "crash":
        ctypes.string_at(0)
    if completion == "print":
        print("hello from the hook")
    if completion == "megabytes":
        return "/" + "x" * 50_000_000
    if completion == "huge number":
        return 10**400
    if completion == "raise megabytes":
        raise ValueError("x" * 50_000_000)
    if completion.startswith("write"):
        for number in range(3, 1000):
            try:
                os.write(number, b"0" * (2_000_000 if "end" in completion else 10) + b"\n")
            except OSError:
                pass
    if completion == "close":
        os.closerange(3, 1000)
    if completion == "text":
        return "one"
    if completion == "nan":
        return float("nan")
    return {"right": 1.0, "short": 0.5} if completion == "dict" else row.get("worth", 1.0)

def forks(prompt, completion, answer, row):
    """The child comes back from the function before its parent, with another value."""
    fork = ctypes.CDLL(None).fork if completion == "below Python" else os.fork
    if child := fork():
        os.waitpid(child, 0)
        return row["worth"]
    return -1.0

def pools(prompt, completion, answer, row):
    with multiprocessing.get_context("fork").Pool(2) as pool:
        return sum(pool.map(abs, [row["worth"], 0.0]))

def leaves(prompt, completion, answer, row):
    """Leaves a child, one in its own session, and a daemon whose parent is gone."""
    sleep = "import time; time.sleep(3000)  # left in " + os.getcwd()
    children = [subprocess.Popen([sys.executable, "-c", sleep], start_new_session=new) for new in (False, True)]
    daemon = "import subprocess as s, sys; s.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    subprocess.run([sys.executable, "-c", daemon, sleep], check=True)
    if completion == "hang":
        time.sleep(600)
    if completion == "exit":
        os._exit(3)
    return 1.0

def ends_its_child(prompt, completion, answer, row):
    """A program that a reward starts can be ended in the usual way."""
    child = subprocess.Popen(["sleep", "300"])
    child.terminate()
    return -child.wait(60)

def terminates(prompt, completion, answer, row):
    """As `kill` of all processes of a job does."""
    if completion == "always" or (completion == "once" and not os.path.exists("done")):
        open("done", "w").close()
        os.kill(os.getpid(), signal.SIGTERM)
    return 1.0

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


def make_section(
    name: str,
    weight: float = 1.0,
    timeout_s: float = 120.0,
    pattern: str | None = None,
    correct_at: float | None = None,
) -> RewardSection:
    return RewardSection(name, weight, correct_at, pattern, timeout_s, 64)


# Time limit of a reward that never ends. Other rewards must be scored within this time, also on a busy machine.
HANGS_S = 1.5


def make_inputs(*completions: str, answer: str | None = "19") -> list[RewardInput]:
    return [RewardInput("12+7=", completion, answer, {}) for completion in completions]


def make_worth_inputs(worths: Iterable[float], completion: str = "fine") -> list[RewardInput]:
    """Return one input for each value that the hook reads in its row."""
    return [RewardInput("p", completion, None, {"worth": float(worth)}) for worth in worths]


@pytest.mark.parametrize("name", ["my_rewards:behave", "my_rewards.py:behave"])
def test_a_hook_is_found_by_module_and_by_path(hooks, name):
    with Scorer([make_section(name)]) as scorer:
        [score] = scorer.score(make_worth_inputs([0.25]))
    assert (score.value, score.parts, score.failed) == (0.25, {"behave": 0.25}, None)


@pytest.mark.parametrize(
    ("completion", "failure"),
    [
        ("raise", "raised ZeroDivisionError at my_rewards.py:7: no such luck"),
        ("sys.exit", "raised SystemExit at my_rewards.py:9: 4"),
        ("hang", f"took longer than {HANGS_S} s"),
        ("hang in C", f"took longer than {HANGS_S} s"),
        ("exit", "ended its process: exit code 3"),
        ("crash", "ended its process: SIGSEGV"),
        ("text", "no finite number at my_rewards.py:4: returned 'one'"),
        ("nan", "no finite number at my_rewards.py:4: returned nan"),
        ("megabytes", "no finite number at my_rewards.py:4: returned '/xxxxxxxxxxx...xxxxxxxxxxxxx'"),
        ("huge number", "no finite number at my_rewards.py:4: returned 1"),
        (
            "dict",
            "no finite number at my_rewards.py:4: returned {'right': 1.0, 'short': 0.5}; write a function for each "
            "number, with an entry of its own in rewards",
        ),
        ("raise megabytes", "raised ValueError at my_rewards.py:25: " + "x" * 200 + "..."),
        ("write", "wrote to a file descriptor that is not its own: "),
        ("write and end", "wrote to a file descriptor that is not its own: "),
        ("close", "ended its process: exit code 0"),
    ],
)
def test_a_reward_that_fails_costs_that_rollout_alone(hooks, completion, failure):
    timeout_s = HANGS_S if failure.startswith("took longer") else 120.0
    with Scorer([make_section("my_rewards:behave", timeout_s=timeout_s)]) as scorer:
        scores = scorer.score(make_inputs("fine", completion, "fine"))
    assert [score.value for score in scores] == [1.0, None, 1.0]
    assert (scores[1].failed or "").startswith(f"behave: {failure}")
    assert [score.right for score in scores] == [True, False, True]


def test_failures_are_counted_by_cause_and_the_first_of_each_is_told_with_its_traceback(hooks):
    events = []

    def emit(kind, **fields):
        events.append((kind, fields["what"]))

    with Scorer([make_section("my_rewards:behave")], logs=hooks, emit=emit) as scorer:
        scorer.score(make_inputs("text", "nan", "exit", "raise"))
        scorer.score(make_inputs("nan", *["raise"] * 31))
    assert scorer.failures.counts == {
        "behave: no finite number at my_rewards.py:4": 3,
        "behave: ended its process": 1,
        "behave: raised ZeroDivisionError at my_rewards.py:7": 32,
    }
    assert scorer.failures.most_common() == "behave: raised ZeroDivisionError at my_rewards.py:7 (32 times)"
    left_out = "its rollouts are left out and counted, reward/failed"
    assert events == [
        ("warning", f"reward behave: no finite number at my_rewards.py:4: returned 'one'; {left_out}"),
        ("warning", f"reward behave: ended its process: exit code 3; {left_out}"),
        (
            "warning",
            "reward behave: raised ZeroDivisionError at my_rewards.py:7: no such luck; "
            f"{left_out}; traceback: {Path('reward-errors.log')}",
        ),
    ]
    text = (hooks / "reward-errors.log").read_text()
    assert text.count("Traceback (most recent call last)") == 1
    assert f'File "{hooks / "my_rewards.py"}", line 7, in behave' in text
    assert "rlctl" not in text


def test_causes_are_bounded_in_number(hooks):
    warnings = []
    (hooks / "many.py").write_text(
        "def score(prompt, completion, answer, row):\n    raise type('E' + completion, (Exception,), {})(completion)\n"
    )
    with Scorer([make_section("many:score")], emit=lambda kind, **fields: warnings.append(fields["what"])) as scorer:
        scorer.score(make_inputs(*map(str, range(50))))
    assert len(warnings) == MAX_CAUSES + 1
    assert warnings[-1] == "rewards fail for more than 20 causes; its rollouts are left out and counted, reward/failed"
    assert scorer.failures.counts["other causes"] == 50 - MAX_CAUSES


def test_the_value_is_the_weighted_sum_and_the_first_reward_decides_what_is_right(hooks):
    with Scorer([make_section("exact", weight=2.0), make_section("my_rewards:behave", weight=0.1)]) as scorer:
        inputs = [RewardInput("p", completion, "19", {"worth": 0.5}) for completion in ("19", "20")]
        score_of_19, score_of_20 = scorer.score(inputs)
    assert (score_of_19.value, score_of_19.right) == (2.05, True)
    assert (score_of_20.value, score_of_20.right) == (0.05, False)
    assert score_of_20.parts == {"exact": 0.0, "behave": 0.5}


@pytest.mark.parametrize(("worth", "is_right"), [(0.69, False), (0.7, True), (3.0, True)])
def test_another_reward_decides_where_the_config_says_so(hooks, worth, is_right):
    with Scorer([make_section("exact"), make_section("my_rewards:behave", weight=-1.0, correct_at=0.7)]) as scorer:
        assert scorer.score([RewardInput("p", "20", "19", {"worth": worth})])[0].right is is_right


def test_a_sum_that_overflows_costs_that_rollout_alone(hooks):
    with Scorer([make_section("my_rewards:behave", weight=10.0)]) as scorer:
        scores = scorer.score(make_worth_inputs([1.0, 1e308]))
    assert scores[0].value == 10.0
    assert (scores[1].value, scores[1].failed) == (None, "sum: no finite number: inf of {'behave': 1e+308}")


def test_two_rewards_of_one_name_keep_their_parts_apart(hooks):
    sections = [make_section("regex", pattern="a(.)"), make_section("regex", pattern="b(.)")]
    with Scorer(sections) as scorer:
        assert scorer.score(make_inputs("a1", answer="1"))[0].parts == {"regex": 1.0, "regex-2": 0.0}


@pytest.mark.parametrize("how", ["in Python", "below Python"])
def test_a_forked_child_never_answers_for_its_parent(hooks, how):
    with Scorer([make_section("my_rewards:forks")]) as scorer:
        scores = scorer.score(make_worth_inputs(range(40), completion=how))
    assert [score.value for score in scores] == list(range(40))


def test_a_reward_may_use_processes_of_its_own(hooks):
    with Scorer([make_section("my_rewards:pools")]) as scorer:
        scores = scorer.score(make_worth_inputs(range(4)))
    assert [score.value for score in scores] == [0.0, 1.0, 2.0, 3.0]
    with Scorer([make_section("my_rewards:ends_its_child")]) as scorer:
        assert scorer.score(make_inputs(""))[0].value == 15.0


def find_leftovers() -> list[int]:
    """Return the pids of processes that this test's rewards left. Their programs name the test's folder."""
    mark = f"# left in {os.getcwd()}"
    pids = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess):
            has_mark = any(argument.endswith(mark) for argument in process.cmdline())
            if has_mark and process.status() != psutil.STATUS_ZOMBIE:
                pids.append(process.pid)
    return pids


def test_whatever_a_reward_started_ends_with_its_worker(hooks, monkeypatch):
    with Scorer([make_section("my_rewards:leaves")]) as scorer:
        worker = scorer.workers[0]
        assert scorer.score(make_inputs("exit"))[0].value is None
        assert find_leftovers() == []
        with monkeypatch.context() as short_timeout:
            for any_worker in scorer.workers:
                short_timeout.setattr(any_worker, "_sections", [make_section("my_rewards:leaves", timeout_s=HANGS_S)])
            assert scorer.score(make_inputs("hang"))[0].value is None
        assert find_leftovers() == []
        assert scorer.score(make_inputs("fine"))[0].value == 1.0
        assert len(find_leftovers()) == 3
        assert worker is scorer.workers[0]
    assert find_leftovers() == []


def test_whatever_a_reward_started_ends_when_the_driver_is_killed(hooks):
    driver = """
import sys, time
from rlctl.config.grpo_schema import RewardSection
from rlctl.rewards.base import RewardInput
from rlctl.rewards.scorer import MAX_NAMES, Scorer
scorer = Scorer([RewardSection("my_rewards:leaves", 1.0, None, None, 120.0, 64)])
print(scorer.score([RewardInput("p", "fine", None, {})])[0].value, flush=True)
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "1.0\n"
    assert len(find_leftovers()) == 3
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()
    assert psutil.wait_procs(family, timeout=300)[1] == []
    assert find_leftovers() == []


def test_a_pattern_that_backtracks_for_ever_costs_that_rollout(hooks):
    with Scorer([make_section("regex", timeout_s=HANGS_S, pattern="^(a+)+$")]) as scorer:
        scores = scorer.score(make_inputs("a" * 40 + "b", "a", answer="a"))
    assert [score.value for score in scores] == [None, 1.0]


def test_many_items_keep_their_order_over_several_workers(hooks):
    with Scorer([make_section("my_rewards:behave")]) as scorer:
        scores = scorer.score(make_worth_inputs(range(500)))
    assert [score.value for score in scores] == list(range(500))


def test_exact_alone_starts_no_process():
    with Scorer([make_section("exact")]) as scorer:
        scorer.score(make_inputs("19") * 512)
        assert all(worker.pid is None for worker in scorer.workers)


def test_a_worker_is_kept_from_batch_to_batch_and_gone_after_close(hooks):
    with Scorer([make_section("my_rewards:process")]) as scorer:
        first_pid = scorer.score(make_inputs("fine"))[0].value
        second_pid = scorer.score(make_inputs("fine"))[0].value
    assert first_pid == second_pid
    with pytest.raises(ProcessLookupError):
        os.kill(int(first_pid or 0), 0)


def test_what_a_hook_prints_goes_to_the_log(hooks, monkeypatch):
    # Where it is set, as in many containers, nothing stays in a buffer of a process that is killed.
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    with Scorer([make_section("my_rewards:behave")], logs=hooks) as scorer:
        assert scorer.score(make_inputs("print"))[0].value == 1.0
    assert (hooks / "rewards.log").read_text() == "hello from the hook\n"


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("nowhere:score", "nowhere:score: cannot import: ModuleNotFoundError: No module named 'nowhere'"),
        ("nowhere.py:score", "nowhere.py:score: cannot import: FileNotFoundError"),
        ("my_rewards:os", "my_rewards:os: no function: os of my_rewards is a module"),
        ("my_rewards:absent", "my_rewards:absent: no such function: my_rewards has no 'absent'"),
        (
            "my_rewards:three",
            "my_rewards:three: wrong signature at my_rewards.py:84: it must take (prompt, completion, answer, row)",
        ),
        (
            "exactly",
            "exactly: no such reward: use exact, regex, math_verify, reasoning_gym, judge, or a function of yours",
        ),
    ],
)
def test_a_hook_that_cannot_be_used_is_one_clear_line_before_the_run(hooks, name, complaint):
    with Scorer([make_section(name)]) as scorer, pytest.raises(RewardError) as error:
        scorer.try_on_sample(make_inputs("fine")[0])
    assert str(error.value).startswith(complaint)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("completion", ["raise", "hang", "exit", "text"])
def test_a_hook_that_fails_on_the_sample_is_refused(hooks, completion):
    timeout_s = HANGS_S if completion == "hang" else 120.0
    hook = make_section("my_rewards:behave", timeout_s=timeout_s)
    with Scorer([hook]) as scorer, pytest.raises(RewardError, match="my_rewards:behave: "):
        scorer.try_on_sample(make_inputs(completion)[0])


def test_every_reward_that_is_no_use_has_its_line(hooks):
    sections = [make_section("nowhere:score"), make_section("exactly")]
    with Scorer(sections) as scorer, pytest.raises(RewardError) as error:
        scorer.try_on_sample(make_inputs("fine")[0])
    assert [line.split(": ")[0] for line in str(error.value).splitlines()] == ["nowhere:score", "exactly"]


def test_a_sample_that_works_gives_its_score(hooks):
    with Scorer([make_section("exact"), make_section("my_rewards:behave")]) as scorer:
        assert scorer.try_on_sample(make_inputs("19")[0]).value == 2.0


def test_a_hook_that_breaks_during_the_run_costs_rollouts_and_not_the_run(hooks):
    with Scorer([make_section("my_rewards:behave")]) as scorer:
        assert scorer.score(make_inputs("fine"))[0].value == 1.0
        (hooks / "my_rewards.py").write_text("syntax error")
        scores = scorer.score(make_inputs("exit", "fine"))
    assert scores[0].failed == "behave: ended its process: exit code 3"
    assert "cannot import: SyntaxError" in (scores[1].failed or "")


def test_a_worker_that_somebody_terminates_does_its_item_again(hooks):
    with Scorer([make_section("my_rewards:terminates")]) as scorer:
        scores = scorer.score(make_inputs("once", "always", "fine"))
    assert [score.value for score in scores] == [1.0, None, 1.0]
    assert scores[1].failed == "terminates: ended its process: SIGTERM"


ECHO = Path(__file__).parents[1] / "environments/trl_style/echo.py"


def make_echo_section(name: str, weight: float = 1.0) -> RewardSection:
    return make_section(f"{ECHO}:{name}", weight, timeout_s=20.0)


def test_a_reward_by_the_names_of_its_parameters_gets_lists_of_one() -> None:
    row = {"prompt": "2+2=", "answer": "4"}
    scores = []
    with Scorer([make_echo_section("plain")]) as scorer:
        for completion in "45":
            scores += scorer.score([RewardInput("2+2=", completion, "4", row)])
    assert [score.value for score in scores] == [1.0, 0.0]


def test_a_reward_that_takes_environments_has_the_value_that_its_environment_gave_times_its_weight() -> None:
    reward_input = RewardInput("Echo.", "done", None, {})
    sections = [make_echo_section("reward_func", 0.5), make_echo_section("is_expected_text")]
    with Scorer(sections, episodes=True) as scorer:
        assert scorer.try_on_sample(reward_input).value is None
        episode_rewards: list[dict[str, float]] = [{sections[0].name: 0.8, "won": 1.0}, {"won": 0.0}, {}]
        scores = scorer.score([reward_input] * 3, episode_rewards)
    assert [score.value for score in scores] == [1.4, 0.0, None]
    assert scores[0].parts == {"reward_func": 0.8, "is_expected_text": None, "won": 1.0}
    assert scores[2].failed == "reward_func: no reward judges it: each returned None"
    with Scorer(sections) as scorer, pytest.raises(RewardError, match="takes environments, and there is no episode"):
        scorer.try_on_sample(reward_input)


def test_names_of_rewards_that_environments_make_up_are_bounded_and_none_of_their_value_is_lost() -> None:
    warnings: list[str] = []
    inputs = [RewardInput("", "", None, {})] * (MAX_NAMES + 3)
    episode_rewards = [{f"episode-{number}": 0.5, "won": 1.0} for number in range(len(inputs))]
    with Scorer([], emit=lambda kind, **fields: warnings.append(fields["what"]), episodes=True) as scorer:
        scores = scorer.score(inputs, episode_rewards)
    assert [score.value for score in scores] == [1.5] * len(inputs)
    assert len(set(chain.from_iterable(score.parts for score in scores))) == MAX_NAMES + 1
    assert scores[-1].parts == {"other": 0.5, "won": 1.0}
    assert warnings == [
        "reward names: environments give rewards of more than 50 names: the rewards of further ones, first "
        f"'episode-{MAX_NAMES - 1}', are added up as 'other'"
    ]
