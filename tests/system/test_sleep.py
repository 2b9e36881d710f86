"""A run whose engine sleeps while the trainer works, and forgets its weights and its cache, learns as another run does.
The engine is a real one on a CPU. vLLM itself drops nothing there, so it fills its parameters with NaN instead.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rlctl.generation.engine import Engine, LoadMode
from rlctl.generation.spec import EngineKind, EngineSpec
from rlctl.generation.vllm.engine import VllmEngine
from rlctl.generation.vllm.kind import environment
from tests.faults.runs import Run, read

ROOT = Path(__file__).parents[2]
# File that an engine writes before it dies in its sleep, once.
DIED = "TEST_ENGINE_DIED"


class ForgetfulEngine(VllmEngine):
    """Takes itself for one whose weights are dropped, and loses them; dies in its second sleep."""

    def refit_open(self, *arguments: Any) -> LoadMode:
        super().refit_open(*arguments)
        self._overwrites = True
        return LoadMode("staged", "to forget", 0, overwrites=True)

    def sleep(self) -> None:
        super().sleep()
        self.rpc("rl_forget")
        died = Path(os.environ[DIED])
        if self._version == 1 and not died.exists():
            died.touch()
            os._exit(1)


def forgetful(spec: EngineSpec) -> Engine:
    return ForgetfulEngine(spec, "tests.system.engine_workers.ForgettingWorker")


KIND = EngineKind(forgetful, environment)


def main() -> None:
    """Run the command behind the word rlctl.cli.main with engines that forget."""
    from rlctl.cli.main import main as command_line
    from rlctl.launch import worker_specs

    engine_spec = worker_specs.engine_spec

    def sleeping(*arguments: Any) -> Any:
        return replace(engine_spec(*arguments), sleeps=True, kind="tests.system.test_sleep:KIND")

    worker_specs.engine_spec = sleeping
    sys.argv = ["rlctl", *sys.argv[sys.argv.index("rlctl.cli.main") + 1 :]]
    command_line()


def learned(run: Run) -> list[dict[str, Any]]:
    """Metrics of a run's steps and validations, without times and without the cost of an engine's loss."""
    kept = ("kind", "step", "reward/", "loss/", "mismatch/", "length/", "train/", "groups/", "validation/")
    records = [
        {key: value for key, value in record.items() if key.startswith(kept)}
        for record in read(run.path / "metrics.jsonl")
    ]
    return [{key: value for key, value in record.items() if "seconds" not in key} for record in records]


@pytest.mark.long  # two whole runs
def test_a_run_with_an_engine_that_forgets_in_its_sleep_and_dies_in_one_is_another_run_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(DIED, str(tmp_path / "died"))
    settings = (
        "grpo.num_steps=3",
        "grpo.dynamic_sampling={filter: rewards, max_extra: 1}",
        "validation.every=1",
        "validation.at_start=true",
        "validation.max_prompts=10",
    )
    awake = Run(tmp_path, "awake", *settings)
    assert awake.end() == 0, awake.text()
    within = (sys.executable, "-c", "from tests.system.test_sleep import main; main()")
    asleep = Run(tmp_path, "asleep", *settings, within=within)
    assert asleep.end() == 0, asleep.text()
    # The step in which the engine is rebuilt has no metrics of a refit.
    assert ["refit/wake" in step for step in asleep.steps()] == [True, False, True]
    assert [event["engine"] for event in asleep.events() if event["kind"] == "engine_restarted"] == [0]
    assert learned(asleep) == learned(awake)
    assert len(learned(awake)) == 7
