"""`rlctl eval`, real Ray, real vLLM: the run's own validation to the digit, transformers' answers, kill and resume."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from tests.faults.runs import Run, read
from tests.system.test_episodes import GUESS, tasks

RLCTL = [sys.executable, "-m", "rlctl"]


def evaluate(*arguments: str, cwd: Path) -> Any:
    done = subprocess.run([*RLCTL, "eval", *arguments, "--json"], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


SAMPLED = ("validation.num_generations=2", "validation.temperature=0.7", "validation.max_prompts=40")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run with three checkpoints, each validated."""
    settings = ("grpo.num_steps=3", "grpo.num_prompts_per_step=16", "validation.every=1", "checkpoint.every=1")
    run = Run(tmp_path_factory.mktemp("eval"), "three", *settings, "checkpoint.keep_last=3", *SAMPLED)
    assert run.end() == 0, run.text()
    yield run


def validation(run: Run, step: int) -> dict[str, float]:
    """Return the numbers that a run recorded of a step's validation, without its time."""
    records = [record for record in read(run.path / "metrics.jsonl") if record["kind"] == "validation"]
    (of_step,) = [record for record in records if record["step"] == step]
    return {name: value for name, value in of_step.items() if name.startswith("validation/")}


@pytest.mark.long  # test_grpo.py says it once, of its run
def test_it_equals_validation_on_every_checkpoint_and_a_second_time_samples_nothing(run: Run) -> None:
    for step in (1, 2, 3):
        (evaluation,) = evaluate(str(run.path / f"checkpoints/step_{step}"), cwd=run.path)
        assert evaluation["figures"]["metrics"] == validation(run, step)
        assert evaluate(str(run.path), "--step", str(step), cwd=run.path) == [evaluation]


@pytest.mark.long  # three starts of an engine
def test_a_greedy_answer_is_that_of_transformers(run: Run, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    greedy = ("validation.num_generations=1", "validation.temperature=0", "validation.max_prompts=null")
    (evaluation,) = evaluate(str(run.path), *greedy, "--to", str(tmp_path), cwd=run.path)
    model = AutoModelForCausalLM.from_pretrained(evaluation["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(evaluation["model"])
    (folder,) = tmp_path.glob("step_3--validation--*")
    records = read(folder / "rollouts.jsonl")
    right = 0
    for record in records:
        prompt = tokenizer(record["prompt"], return_tensors="pt", add_special_tokens=False)
        with torch.no_grad():
            tokens = model.generate(**prompt, max_new_tokens=evaluation["max_new_tokens"], do_sample=False)
        answer = tokenizer.decode(tokens[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
        assert answer == record["rollouts"][0]["completion"], record["task"]
        right += answer.strip() == record["answer"]
    assert right == sum(task["right"] for task in evaluation["by_task"])
    assert evaluation["figures"]["accuracy"]["value"] == right / len(records)


@pytest.mark.long  # two starts of an engine
def test_an_evaluation_that_is_killed_goes_on_and_ends_as_it_would_have(run: Run, tmp_path: Path) -> None:
    (uninterrupted,) = evaluate(str(run.path), "--step", "2", cwd=run.path)
    arguments = [str(run.path), "--step", "2", "--save-every", "1", "--to", str(tmp_path), "--json"]
    with subprocess.Popen([*RLCTL, "eval", *arguments], cwd=run.path, stderr=subprocess.DEVNULL) as process:
        end = time.monotonic() + 300
        while len(list(tmp_path.glob("*/parts/0*"))) < 5:
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
    saved = sorted(tmp_path.glob("*/parts/0*"))
    assert 5 <= len(saved) < 40
    (saved[2] / "groups.npz").unlink()
    done = subprocess.run([*RLCTL, "eval", *arguments], cwd=run.path, capture_output=True, text=True, check=True)
    assert f"note: {saved[2]}/groups.npz: missing; sampled again: 1 task" in done.stderr
    (evaluation,) = json.loads(done.stdout)
    assert evaluation == {**uninterrupted, "path": evaluation["path"]}
    assert len(list(tmp_path.glob("*/parts/0*"))) == 40


@pytest.mark.long  # the parts have unit tests
def test_stored_answers_are_scored_by_other_rewards_and_compared(run: Run, tmp_path: Path) -> None:
    evaluate(str(run.path), cwd=run.path)
    (stored,) = run.path.glob("evals/step_3--validation--????????")
    (tmp_path / "mine.py").write_text("def short(prompt, completion, answer, row):\n    return len(completion) < 2\n")
    rewards = "rewards=[{name: mine.py:short}]"
    (evaluation,) = evaluate("--rescore", str(stored), rewards, cwd=tmp_path)
    rollouts = chain.from_iterable(record["rollouts"] for record in read(stored / "rollouts.jsonl"))
    texts = [rollout["completion"] for rollout in rollouts]
    assert evaluation["figures"]["accuracy"]["value"] == sum(len(text) < 2 for text in texts) / len(texts)
    # The same rewards give the same scores.
    (same,) = evaluate("--rescore", str(stored), cwd=tmp_path)
    before = json.loads((stored / "result.json").read_text())
    assert same["by_task"] == before["by_task"]
    assert same["figures"] == before["figures"]
    (of_run,) = evaluate("--rescore", str(run.path), "--step", "3", cwd=tmp_path)
    assert of_run["by_task"] == before["by_task"][: len(of_run["by_task"])]
    done = subprocess.run(
        [*RLCTL, "eval", "--compare", str(stored), evaluation["path"]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "chance" in done.stdout


@pytest.mark.long  # a run and an engine
def test_episodes_are_evaluated_as_the_runs_own_validation_plays_them(tmp_path: Path) -> None:
    data = (f"data.train.path={tasks(tmp_path, 16)}", f"data.validation.path={tasks(tmp_path, 12)}")
    short = ("grpo.num_steps=1", "validation.at_start=false", "validation.every=1", "run.probe=false")
    settings = short + GUESS + data
    run = Run(tmp_path, "games", *settings)
    assert run.end() == 0, run.text()
    (evaluation,) = evaluate(str(run.path), "--save-every", "5", cwd=tmp_path)
    validated = validation(run, 1)
    assert validated["validation/prompts"] == 12
    metrics = evaluation["figures"]["metrics"]
    seconds = {name for name in validated if "seconds" in name}
    expected = {name: value for name, value in validated.items() if name not in seconds}
    assert {name: metrics[name] for name in expected} == expected
