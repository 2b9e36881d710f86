"""Reward processes that die, speak or stand still between calls, and any text, result or output of a reward."""

import os
import resource
import signal
import time
from pathlib import Path

import psutil
import pytest

from rlctl.config.grpo_schema import RewardSection
from rlctl.rewards import reward_process as reward_worker
from rlctl.rewards.base import RewardInput
from rlctl.rewards.scorer import Score, Scorer
from rlctl.telemetry.events import EventLog
from rlctl.telemetry.jsonl import read_records
from rlctl.workers.user_logs import MAX_LOG_BYTES
from tests.waiting import until

HOOK = """
import json, os, threading, time
import numpy as np

class Unready:
    shape = ()
    def item(self):
        raise RuntimeError("not computed")

def score(prompt, completion, answer, row):
    if completion == "surrogate":
        raise ValueError("bad " + json.loads('"\\\\ud83d"'))
    if completion == "numpy":
        return np.bool_(True)
    if completion == "numpy int":
        return np.int32(3)
    if completion == "array":
        return np.ones(3)
    if completion == "unready":
        return Unready()
    if completion.startswith("nested"):
        for number in range(3, 1000):
            try:
                os.write(number, row["text"].encode() + b"\\n")
            except OSError:
                pass
    if completion == "speaks later":
        def speak():
            time.sleep(0.2)
            # Its own connection has the number that it has in the parent.
            for number in range(3, 1000):
                try:
                    os.write(number, b"hello\\n")
                except OSError:
                    pass
            open("done", "w").close()
        threading.Thread(target=speak).start()
    if completion == "dies later":
        def die():
            open("done", "w").close()
            os._exit(3)
        threading.Timer(0.2, die).start()
    if completion == "chatter":
        print("x" * row["size"])
    if completion == "environment":
        return float("tmp-of-ray" in os.environ.get("TMPDIR", ""))
    return 1.0
"""


@pytest.fixture
def hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RewardSection:
    (tmp_path / "own.py").write_text(HOOK)
    monkeypatch.chdir(tmp_path)
    return RewardSection("own.py:score", 1.0, None, None, 120.0, 64)


def score_all(scorer: Scorer, *completions: str, **row: object) -> list[Score]:
    """Score completions of one row."""
    return scorer.score([RewardInput("p", completion, None, row) for completion in completions])


def find_pids(scorer: Scorer) -> list[int | None]:
    return [worker.pid for worker in scorer.workers]


def test_a_text_that_is_no_utf8_costs_that_rollout_and_is_logged(hook: RewardSection, tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events.jsonl")
    with Scorer([hook], logs=tmp_path, emit=events.emit) as scorer:
        scores = score_all(scorer, "surrogate", "fine")
    assert [score.value for score in scores] == [None, 1.0]
    assert scores[0].failed == "score: raised ValueError at own.py:12: bad ?"
    assert "bad ?" in read_records(tmp_path / "events.jsonl")[0]["what"]
    assert "ValueError: bad ?" in (tmp_path / "reward-errors.log").read_text(encoding="utf-8")


def test_a_value_that_is_a_scalar_of_numpy_counts_and_one_that_raises_has_its_line(hook: RewardSection) -> None:
    with Scorer([hook]) as scorer:
        scores = score_all(scorer, "numpy", "numpy int", "array", "unready")
    assert [score.value for score in scores] == [1.0, 3.0, None, None]
    assert (scores[2].failed or "").startswith("score: no finite number at own.py:10: returned array")
    assert scores[3].failed == "score: raised RuntimeError at own.py:8: not computed"


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"call": %s}' % ("[" * 500 + "]" * 500), '{"call": 1, "item": 0, "failure": {"kind": 1}}']
)
def test_a_reply_of_any_form_costs_that_rollout_alone(hook: RewardSection, text: str) -> None:
    with Scorer([hook]) as scorer:
        scores = score_all(scorer, "nested", "fine", text=text)
    assert [score.value for score in scores] == [None, 1.0]
    assert (scores[0].failed or "").startswith("score: wrote to a file descriptor that is not its own")


@pytest.mark.parametrize("how", ["dies later", "speaks later"])
def test_what_a_process_does_between_calls_costs_no_rollout(hook: RewardSection, how: str) -> None:
    with Scorer([hook]) as scorer:
        assert score_all(scorer, how)[0].value == 1.0
        until(Path("done").exists)
        # The process's text, or its end, is there to be read.
        time.sleep(0.1)
        assert score_all(scorer, "fine", "fine")[0].failed is None
        assert not scorer.failures.counts


def test_a_driver_with_a_thousand_open_files_keeps_its_process(hook: RewardSection) -> None:
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Earlier tests of this process have files open, too.
    needed_limit = len(os.listdir("/proc/self/fd")) + 2048
    if 0 <= hard_limit < needed_limit:
        pytest.skip(f"a process may have {hard_limit} open files here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft_limit, needed_limit), hard_limit))
    opened_files = list[int]()
    try:
        for _ in range(1100):
            opened_files.append(os.open(os.devnull, os.O_RDONLY))
        with Scorer([hook]) as scorer:
            score_all(scorer, "fine")
            first_pids = find_pids(scorer)
            score_all(scorer, "fine")
            assert find_pids(scorer) == first_pids
    finally:
        for descriptor in opened_files:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft_limit, hard_limit))


def test_a_process_that_takes_no_request_is_replaced(hook: RewardSection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_worker, "SEND_TIMEOUT_S", 0.5)
    with Scorer([hook]) as scorer:
        score_all(scorer, "fine")
        started_workers = [worker for worker in scorer.workers if worker.pid]
        assert len(started_workers) == 1
        worker = started_workers[0]
        supervisor = psutil.Process(worker.pid)
        (reward_parent,) = supervisor.children()
        (reward_process,) = reward_parent.children()
        os.kill(reward_process.pid, signal.SIGSTOP)
        with monkeypatch.context() as patch_of_worker:
            stop = worker.stop

            def stop_and_allow_time() -> None:
                """Stop the process. Its replacement gets a long time, because it may start slowly."""
                monkeypatch.setattr(reward_worker, "SEND_TIMEOUT_S", 120.0)
                stop()

            patch_of_worker.setattr(worker, "stop", stop_and_allow_time)
            assert score_all(scorer, "fine", text="x" * 5_000_000)[0].failed is None
        # If no process takes the request, its failure says so.
        monkeypatch.setattr(reward_worker, "SEND_TIMEOUT_S", 1e-4)
        assert score_all(scorer, "fine", text="x" * 50_000_000)[0].failed == (
            "score: could not be asked: its process took no request"
        )


def test_a_process_that_starts_while_ray_starts_has_the_environment_from_before(
    hook: RewardSection, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Scorer([hook]) as scorer:
        monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp-of-ray"))
        assert score_all(scorer, "environment")[0].value == 0.0


def test_what_rewards_print_is_bounded_and_the_bound_is_told_once(hook: RewardSection, tmp_path: Path) -> None:
    warnings: list[str] = []
    with Scorer([hook], logs=tmp_path, emit=lambda kind, **fields: warnings.append(fields["what"])) as scorer:
        scores = score_all(scorer, *["chatter"] * 16, size=MAX_LOG_BYTES // 4)
    assert all(score.value == 1.0 for score in scores)
    assert warnings == ["rewards printed more than 4 MiB: rewards.log has no more of it"]
    log = tmp_path / "rewards.log"
    assert MAX_LOG_BYTES < log.stat().st_size < MAX_LOG_BYTES + 200
    assert log.read_text().endswith("\n[rewards printed more than 4 MiB: the rest is left out]\n")


def test_a_row_that_no_pickle_takes_costs_its_own_score(hook: RewardSection) -> None:
    deep_list: object = 1
    for _ in range(700):
        deep_list = [deep_list]
    inputs = [RewardInput("", "ok", None, {})] * 12
    inputs[3] = RewardInput("", "ok", None, {"deep": deep_list})
    inputs[4] = inputs[3]
    with Scorer([hook]) as scorer:
        scores = scorer.score(inputs)
    assert [score.value for score in scores] == [1.0, 1.0, 1.0, None, None, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert scores[3].failed == "score: was given a value that cannot be sent: RecursionError"
