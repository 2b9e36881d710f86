"""`rlctl.train` and `rlctl.evaluate` from Python: real runs, Ctrl-C, errors, a notebook."""

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import rlctl
from tests.faults.runs import WITHOUT_VLLM

SMALL = [WITHOUT_VLLM, "validation.max_prompts=20", "validation.every=0"]


@pytest.fixture(autouse=True)
def working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_two_runs_one_after_the_other_with_rows_and_a_reward_of_this_process(tmp_path: Path) -> None:
    factor = 0.01

    def brevity(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> float:
        return 1.0 - factor * len(completion)

    rows = [{"prompt": f"{a}+{b}=", "answer": a + b} for a in range(40, 50) for b in range(20)]
    variables = dict(os.environ)
    handler = signal.getsignal(signal.SIGINT)
    lines = list[str]()
    steps = list[Mapping[str, float]]()
    overrides = dict(text.split("=", 1) for text in SMALL) | {
        "generation.engine": WITHOUT_VLLM.partition("=")[2],
        "validation.max_prompts": 20,
        "validation.every": 0,
        "grpo.num_steps": 2,
        "data.train.path": rows,
        "rewards": ["exact", {"name": brevity, "weight": 0.1}],
    }
    first_run = rlctl.train("grpo-tiny", overrides, log=lines.append, on_step=steps.append)
    second_run = rlctl.train(resume=first_run, overrides=["grpo.num_steps=3"], log=None)

    assert (dict(os.environ), signal.getsignal(signal.SIGINT)) == (variables, handler)
    assert second_run.path == first_run.path == tmp_path / "runs" / first_run.name
    assert second_run.status == "done"
    assert any(line.startswith("started") for line in lines)
    training_steps = [metrics["step"] for metrics in steps if "reward/mean" in metrics]
    assert training_steps == [1, 2]
    assert second_run.metrics.column("step") == [1, 2, 3]
    checkpoint = second_run.checkpoints[-1]
    assert checkpoint.step == 3 and checkpoint.weights and (checkpoint.weights / "config.json").is_file()
    group = next(second_run.rollouts("train", step=3))
    assert {"prompt": group.prompt, "answer": int(group.answer)} in rows
    rollout = group.rollouts[0]
    assert rollout.rewards["brevity"] == pytest.approx(1.0 - factor * len(rollout.text.removesuffix("<eos>")))
    assert len(group.exact_tokens()) == len(group.rollouts)


def test_ctrl_c_saves_and_is_raised(tmp_path: Path) -> None:
    def interrupt(metrics: Mapping[str, float]) -> None:
        if metrics["step"] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(rlctl.Interrupted, match="Ctrl-C") as end:
        rlctl.train("grpo-tiny", [*SMALL, "grpo.num_steps=2000"], log=None, on_step=interrupt)
    run = end.value.run
    assert run and run.status == "interrupted"
    assert run.checkpoints[-1].step == len(run.metrics) >= 2


def test_an_error_of_a_callback_stops_the_run_and_is_raised() -> None:
    def fail(metrics: Mapping[str, float]) -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        rlctl.train("grpo-tiny", [*SMALL, "grpo.num_steps=2000"], log=None, on_step=fail)
    (path,) = Path("runs").glob("*/")
    assert rlctl.load_run(path).status == "stopped"


def test_problems_of_a_later_stage_come_as_problems_and_a_failed_run_as_its_reason(tmp_path: Path) -> None:
    long_row = '{"prompt": "' + "1+" * 500 + '1", "answer": "2"}\n'
    (tmp_path / "long.jsonl").write_text(long_row * 4)
    no_validation = ["data.validation.fraction=null", "data.validation.path=null"]
    with pytest.raises(rlctl.ConfigError, match="above the longest sequence"):
        rlctl.train("grpo-tiny", [*SMALL, "data.train.path=long.jsonl", *no_validation], log=None)

    def only_right_answers(prompt: str, completion: str, answer: str, row: dict[str, Any]) -> float:
        if completion != answer:
            raise ValueError("wrong answers are not for me")
        return 1.0

    engine = WITHOUT_VLLM.partition("=")[2]
    overrides = {
        "generation.engine": engine,
        "health.failed_reward_steps": 1,
        "grpo.num_steps": 5,
        "rewards": [only_right_answers],
    }
    with pytest.raises(rlctl.RunFailed, match=r"raised ValueError at .*test_api\.py:\d+") as failure:
        rlctl.train("grpo-tiny", overrides, log=None)
    assert failure.value.run and failure.value.run.status == "failed"
