"""A run with three sources, one of which is slow, is killed and goes on as if nothing had happened."""

import hashlib
import json
import time
from fractions import Fraction
from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES
from tests.faults.runs import Run, in_transit, survivors
from tests.faults.test_resume import check_same_runs, lasting_metrics

WEIGHTS = {"fast": 3, "other": 2, "slow": 1}
SLOW = """
import time

def exact(prompt, completion, answer, row):
    time.sleep(0.1 if row["slow"] else 0.005)
    return float(completion.strip() == answer)
"""


def make_mix(folder: Path) -> list[str]:
    """Write three sources of tasks, of which one has rewards that take twenty times as long. Return the overrides."""
    rows = [json.loads(line) for line in (RECIPES / "tiny-data/train.jsonl").read_text().splitlines()[:400]]
    sources = {}
    for place, (name, weight) in enumerate(WEIGHTS.items()):
        rows_of_source = rows[place::3]
        if name == "other":
            # This source has so few rows that it starts again within the run.
            rows_of_source = rows_of_source[:7]
        lines = [json.dumps({**row, "slow": name == "slow"}) + "\n" for row in rows_of_source]
        (folder / f"{name}.jsonl").write_text("".join(lines))
        sources[name] = {"path": str(folder / f"{name}.jsonl"), "weight": weight}
    (folder / "slow.py").write_text(SLOW)
    return ["data.train.path=null", f"data.train.sources={json.dumps(sources)}"]


def run_with_kills(folder: Path, kind: str, settings: list[str], kills: tuple[int, int]) -> Run:
    """Run to the end; kill the driver in each of the steps `kills` and resume."""
    run = Run(folder, "hurt-sources", *settings, kind=kind)
    for number, step in enumerate(kills):
        run.wait_for_step(step)
        time.sleep(0.1 * number)
        assert survivors(run.kill()) == []
        run = Run(folder, "hurt-sources", resume=True, kind=kind)
    assert run.end() == 0, run.text()
    return run


def hash_weights(run: Run, step: int) -> str:
    return hashlib.sha256((run.path / f"checkpoints/step_{step}/hf/model.safetensors").read_bytes()).hexdigest()


@pytest.mark.long  # two runs
def test_a_mix_of_prompts_with_a_slow_source_resumes_bit_for_bit(tmp_path: Path) -> None:
    steps = ["grpo.num_steps=18", "checkpoint.every=6", "checkpoint.keep_last=3", "validation.every=6"]
    settings = [*steps, *make_mix(tmp_path), f"rewards=[{{name: {tmp_path}/slow.py:exact}}]"]
    hurt = run_with_kills(tmp_path, "grpo", settings, (9, 14))
    unhurt = Run(tmp_path, "unhurt-sources", *settings)
    assert unhurt.end() == 0, unhurt.text()
    check_same_runs(hurt, unhurt, 18)
    shares = {name: [step[f"source/{name}/share"] for step in hurt.steps()] for name in WEIGHTS}
    for name, weight in WEIGHTS.items():
        # Each source's share of 144 prompts is exact within two prompts.
        assert abs(Fraction(sum(shares[name])) / 18 - Fraction(weight, 6)) <= Fraction(2, 144)
    print(f"weights {hash_weights(hurt, 18)} and {hash_weights(unhurt, 18)}; shares {shares}")
    assert in_transit("hurt-sources") == in_transit("unhurt-sources") == []


@pytest.mark.long  # two runs
def test_a_mix_of_samples_resumes_bit_for_bit(tmp_path: Path) -> None:
    steps = ["sft.num_steps=60", "sft.batch_size=16", "checkpoint.every=20", "validation.every=20"]
    settings = [*steps, *make_mix(tmp_path)]
    hurt = run_with_kills(tmp_path, "sft", settings, (30, 50))
    unhurt = Run(tmp_path, "unhurt-sources", *settings, kind="sft")
    assert unhurt.end() == 0, unhurt.text()
    metrics = [lasting_metrics(step) for step in hurt.steps()]
    assert metrics == [lasting_metrics(step) for step in unhurt.steps()] and len(metrics) == 60
    assert hash_weights(hurt, 60) == hash_weights(unhurt, 60)
    print(f"weights {hash_weights(hurt, 60)}")
