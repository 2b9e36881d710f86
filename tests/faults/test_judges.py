"""Runs with a judge: failing calls cost no step, a kill and a spent budget change nothing, no file has the key."""

import zlib
from pathlib import Path

import pytest

from rlctl.dashboard.state import read_state
from rlctl.dashboard.summary import facts_of
from rlctl.telemetry.rollouts_file import index, read_groups
from tests.faults.runs import WITHOUT_VLLM, Run
from tests.faults.test_resume import check_same_runs
from tests.judge_server import Answer, JudgeServer

KEY = "sk-Very-Secret-0123456789"
PROMPT = "{prompt}{answer}\n{completion}"


def behave(question: str, number: int) -> Answer:
    """Fail a fifth of the calls. A verdict depends on the question alone."""
    problems = [Answer(status=503), Answer(status=429, headers={"Retry-After": "0.1"}), Answer(copies=0)]
    if number % 5 == 4:
        return problems[number // 5 % 3]
    return Answer(f"checked\nverdict: {zlib.crc32(question.encode()) % 5}")


def settings_of(server: JudgeServer, more: str = "") -> list[str]:
    judge = f"{{name: judge, base_url: '{server.url}', model: grader, api_key_env: JUDGE_KEY, prompt: judge.txt"
    judge += f", scale: [0, 4], retries: 8, price_output: 5.0{more}}}"
    return [
        WITHOUT_VLLM, f"rewards=[{judge}, {{name: exact, weight: 0.5}}]", "grpo.num_steps=4",
        "checkpoint.every=1", "checkpoint.keep_last=100", "validation.every=0", "telemetry.groups_per_step=8",
    ]  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    (tmp_path / "judge.txt").write_text(PROMPT)
    return tmp_path


def files_with(text: str, folder: Path) -> list[Path]:
    """Return the files below a folder whose bytes have a text."""
    return [path for path in folder.rglob("*") if path.is_file() and text.encode() in path.read_bytes()]


@pytest.mark.long  # four attempts; unit/rewards/test_judge.py has each failure by itself
def test_a_fifth_of_failing_calls_costs_no_step_and_a_kill_and_a_spent_budget_change_nothing(folder: Path) -> None:
    with JudgeServer(behave) as server:
        unhurt = Run(folder, "whole", *settings_of(server))
        assert unhurt.end() == 0, unhurt.text()
        check_an_unhurt_run(unhurt)
        num_questions = len(set(server.questions))

        stopped = Run(folder, "stopped", *settings_of(server, ", budget_calls: 60"))
        stopped.wait_for_step(2)
        stopped.kill()
        resumed = Run(folder, "stopped", resume=True)
        assert resumed.end() == 1, resumed.text()
        assert "judge: the judge's budget is spent: budget_calls=60 requests were made; raise it" in resumed.text()
        assert f"rlctl train grpo --resume {stopped.path}" in resumed.text()
        assert 0 < len(resumed.steps()) < 4
        assert (stopped.path / "judge.jsonl").read_text().count("\n") <= 60
        richer = Run(folder, "stopped", "rewards.0.budget_calls=10000", resume=True)
        assert richer.end() == 0, richer.text()
    check_same_runs(richer, unhurt, 4)
    assert len(set(server.questions)) == num_questions
    assert files_with(KEY, folder) == []
    assert files_with("JUDGE_KEY", folder) != []


def check_an_unhurt_run(run: Run) -> None:
    """Check the metrics, the records and the summary of a run whose server failed a fifth of the calls."""
    steps = run.steps()
    assert [step["step"] for step in steps] == [1, 2, 3, 4]
    assert all(step["reward/failed"] == 0 for step in steps)
    assert sum(step["judge/retries"] for step in steps) > 10
    assert all(step["judge/failed"] == 0 for step in steps)
    tokens = sum(step["judge/output_tokens"] for step in steps)
    assert sum(step["judge/cost"] for step in steps) == pytest.approx(tokens * 5 / 1e6)
    assert run.undeclared_metrics() == set()
    groups = list(read_groups(run.path / "rollouts.jsonl", index(run.path / "rollouts.jsonl")))
    assert {rollout["reasons"]["judge"].split()[0] for group in groups for rollout in group["rollouts"]} == {"checked"}
    facts = dict(facts_of(read_state(run.path)))
    assert " requests" in facts["judge"] and "cost " in facts["judge"]
