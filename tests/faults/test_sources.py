"""A run with three sources, one of which is slow, is killed and goes on as if nothing had happened."""

import hashlib
import json
import time
from fractions import Fraction
from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES
from tests.faults.runs import Run, in_transit, survivors
from tests.faults.test_resume import lasting, same

WEIGHTS = {"fast": 3, "other": 2, "slow": 1}
SLOW = """
import time

def exact(prompt, completion, answer, row):
    time.sleep(0.1 if row["slow"] else 0.005)
    return float(completion.strip() == answer)
"""


def mix(folder: Path) -> list[str]:
    """The settings of a mix; rewards of one source take twenty times as long."""
    rows = [json.loads(line) for line in (RECIPES / "tiny-data/train.jsonl").read_text().splitlines()[:400]]
    sources = {}
    for place, (name, weight) in enumerate(WEIGHTS.items()):
        # The smallest begins again within the run.
        own = rows[place::3][: 7 if name == "other" else None]
        texts = [json.dumps({**row, "slow": name == "slow"}) + "\n" for row in own]
        (folder / f"{name}.jsonl").write_text("".join(texts))
        sources[name] = {"path": str(folder / f"{name}.jsonl"), "weight": weight}
    (folder / "slow.py").write_text(SLOW)
    return ["data.train.path=null", f"data.train.sources={json.dumps(sources)}"]


def killed_twice(folder: Path, kind: str, settings: list[str], kills: tuple[int, int]) -> Run:
    run = Run(folder, "hurt-sources", *settings, kind=kind)
    for number, step in enumerate(kills):
        run.wait_for_step(step)
        time.sleep(0.1 * number)
        assert survivors(run.kill()) == []
        run = Run(folder, "hurt-sources", resume=True, kind=kind)
    assert run.end() == 0, run.text()
    return run


def weights_of(run: Run, step: int) -> str:
    return hashlib.sha256((run.path / f"checkpoints/step_{step}/hf/model.safetensors").read_bytes()).hexdigest()


@pytest.mark.long  # two runs
def test_a_mix_of_prompts_with_a_slow_source_resumes_bit_for_bit(tmp_path: Path) -> None:
    steps = ["grpo.num_steps=18", "checkpoint.every=6", "checkpoint.keep_last=3", "validation.every=6"]
    settings = [*steps, *mix(tmp_path), f"rewards=[{{name: {tmp_path}/slow.py:exact}}]"]
    hurt = killed_twice(tmp_path, "grpo", settings, (9, 14))
    whole = Run(tmp_path, "whole-sources", *settings)
    assert whole.end() == 0, whole.text()
    same(hurt, whole, 18)
    shares = {name: [step[f"source/{name}/share"] for step in hurt.steps()] for name in WEIGHTS}
    for name, weight in WEIGHTS.items():
        # Within two of 144 prompts.
        assert abs(Fraction(sum(shares[name])) / 18 - Fraction(weight, 6)) <= Fraction(2, 144)
    print(f"weights {weights_of(hurt, 18)} and {weights_of(whole, 18)}; shares {shares}")
    assert in_transit("hurt-sources") == in_transit("whole-sources") == []


@pytest.mark.long  # two runs
def test_a_mix_of_samples_resumes_bit_for_bit(tmp_path: Path) -> None:
    settings = ["sft.num_steps=60", "sft.batch_size=16", "checkpoint.every=20", "validation.every=20", *mix(tmp_path)]
    hurt = killed_twice(tmp_path, "sft", settings, (30, 50))
    whole = Run(tmp_path, "whole-sources", *settings, kind="sft")
    assert whole.end() == 0, whole.text()
    ours, theirs = ([lasting(step) for step in run.steps()] for run in (hurt, whole))
    assert ours == theirs and len(ours) == 60
    assert weights_of(hurt, 60) == weights_of(whole, 60)
    print(f"weights {weights_of(hurt, 60)}")
