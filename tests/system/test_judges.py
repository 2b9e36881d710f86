"""A judge that the run's own engines serve: its replies are sampled, counted, found again, and never trained on."""

from pathlib import Path

import psutil
import pytest

from rlctl.config.builtin import RECIPES
from rlctl.telemetry.jsonl import read_records
from tests.faults.runs import WITHOUT_VLLM, Run

JUDGE = RECIPES / "tiny/qwen3-sums"
# The model only knows sums: it continues one with a number, which is the verdict.
PROMPT = "{prompt}{completion}"


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=pytest.mark.long)])
def test_engines_of_the_run_judge(engine: str, tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text(PROMPT)
    judge = f"{{name: judge, path: {JUDGE}, prompt: judge.txt, scale: [0, 1000000], max_tokens: 6, max_length: 128}}"
    settings = [
        f"rewards=[{{name: exact}}, {judge}]", "grpo.num_steps=2", "validation.every=0",
        "checkpoint={every: 0, at_end: true}", "health.max_failed_reward_share=1",
    ]  # fmt: skip
    if engine == "torch":
        settings.append(WITHOUT_VLLM)
    run = Run(tmp_path, "own", *settings)
    assert run.end() == 0, run.text()
    assert "rewards.1-0" in run.events("processes")[0]
    steps = run.steps()
    assert [step["version"] for step in steps] == [1, 2]
    assert all(step["judge/calls"] + step["judge/cached"] == 32 for step in steps)
    records = read_records(run.path / "judge.jsonl")
    assert len(records) == sum(step["judge/calls"] for step in steps)
    assert all(record["output_tokens"] <= 6 for record in records)
    tokens = sum(record["output_tokens"] for record in records)
    assert sum(step["judge/output_tokens"] for step in steps) == tokens
    assert run.undeclared_metrics() == set()


@pytest.mark.long  # a run
def test_a_lost_engine_of_a_judge_is_rebuilt_and_answers(tmp_path: Path) -> None:
    (tmp_path / "judge.txt").write_text(PROMPT)
    judge = f"{{name: judge, path: {JUDGE}, prompt: judge.txt, scale: [0, 1000000], max_tokens: 6, cache: false}}"
    run = Run(
        tmp_path, "lost", f"rewards=[{{name: exact}}, {judge}]", WITHOUT_VLLM, "grpo.num_steps=6", "validation.every=0",
        "checkpoint={every: 0, at_end: true}", "health.max_failed_reward_share=1",
    )  # fmt: skip
    run.wait_for_step(2)
    (processes,) = run.events("processes")
    psutil.Process(processes["rewards.1-0"]).kill()
    assert run.end() == 0, run.text()
    assert [step["version"] for step in run.steps()] == [1, 2, 3, 4, 5, 6]
    (restarted,) = run.events("engine_restarted")
    assert restarted["role"] == "rewards.1"
    assert all(step["judge/retries"] == 0 for step in run.steps())
