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
# Environment variable with the file that an engine writes before it dies in its sleep, once.
DEATH_FILE = "TEST_ENGINE_DIED"


class ForgetfulEngine(VllmEngine):
    """Engine that loses its weights in each sleep, and dies in its second sleep."""

    def refit_open(self, *arguments: Any) -> LoadMode:
        super().refit_open(*arguments)
        self._overwrites = True
        return LoadMode("staged", "to forget", 0, overwrites=True)

    def sleep(self) -> None:
        super().sleep()
        self.rpc("rl_forget")
        death_file = Path(os.environ[DEATH_FILE])
        if self._version == 1 and not death_file.exists():
            death_file.touch()
            os._exit(1)


def make_forgetful_engine(spec: EngineSpec) -> Engine:
    return ForgetfulEngine(spec, "tests.system.engine_workers.ForgettingWorker")


KIND = EngineKind(make_forgetful_engine, environment)


def main() -> None:
    """Run the command behind the word rlctl.cli.main with engines that forget."""
    from rlctl.cli.main import main as command_line
    from rlctl.launch import worker_specs

    engine_spec = worker_specs.engine_spec

    def sleeping_engine_spec(*arguments: Any) -> Any:
        return replace(engine_spec(*arguments), sleeps=True, kind="tests.system.test_sleep:KIND")

    worker_specs.engine_spec = sleeping_engine_spec
    sys.argv = ["rlctl", *sys.argv[sys.argv.index("rlctl.cli.main") + 1 :]]
    command_line()


def learning_of(run: Run) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps and validations, without times and without costs of a lost engine."""
    prefixes = ("kind", "step", "reward/", "loss/", "mismatch/", "length/", "train/", "groups/", "validation/")
    learning = []
    for record in read(run.path / "metrics.jsonl"):
        names = [name for name in record if name.startswith(prefixes) and "seconds" not in name]
        learning.append({name: record[name] for name in names})
    return learning


@pytest.mark.long  # two whole runs
def test_a_run_with_an_engine_that_forgets_in_its_sleep_and_dies_in_one_is_another_run_bit_for_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv(DEATH_FILE, str(tmp_path / "died"))
    settings = (
        "grpo.num_steps=3",
        "grpo.dynamic_sampling={filter: rewards, max_extra: 1}",
        "validation.every=1",
        "validation.at_start=true",
        "validation.max_prompts=10",
    )
    awake = Run(tmp_path, "awake", *settings)
    assert awake.end() == 0, awake.text()
    command = (sys.executable, "-c", "from tests.system.test_sleep import main; main()")
    asleep = Run(tmp_path, "asleep", *settings, within=command)
    assert asleep.end() == 0, asleep.text()
    # The step in which the engine is rebuilt has no metrics of a refit.
    assert ["refit/wake" in step for step in asleep.steps()] == [True, False, True]
    assert [event["engine"] for event in asleep.events() if event["kind"] == "engine_restarted"] == [0]
    assert learning_of(asleep) == learning_of(awake)
    assert len(learning_of(awake)) == 7
