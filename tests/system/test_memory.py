"""The memory of a run's driver and of Ray's head does not grow with its steps."""

import time
from pathlib import Path

import psutil
import pytest

from rlctl.telemetry.jsonl import Tail
from tests.faults.runs import WITHOUT_VLLM, Run

pytestmark = pytest.mark.usefixtures("ordinary_workers")

STEPS = 2000
WARM_STEPS = 500
FLAT_BYTES = 5 << 20


@pytest.mark.long  # 4 minutes each on four fast cores (November 2026)
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("groups", [(), ("telemetry.groups_per_step=0",)], ids=["default", "no groups"])
def test_a_run_of_two_thousand_steps_is_flat_after_five_hundred(tmp_path: Path, groups: tuple[str, ...]) -> None:
    settings = (
        "grpo.num_prompts_per_step=2",
        "grpo.num_generations_per_prompt=2",
        f"grpo.num_steps={STEPS}",
        "validation.every=0",
        "checkpoint.every=0",
        "checkpoint.at_end=false",
        "run.probe=false",
    )
    run = Run(tmp_path, "soak", WITHOUT_VLLM, *settings, *groups)
    run.wait_for_step(WARM_STEPS // 50)
    driver = psutil.Process(run.process.pid)
    heads = [process for process in driver.children() if process.name() == "gcs_server"]
    assert len(heads) == 1
    metrics = Tail(run.path / "metrics.jsonl")
    steps_done = 0
    resident: dict[str, list[int]] = {"driver": [], "gcs_server": []}
    while steps_done < STEPS:
        assert run.process.poll() is None, run.text()
        steps_done += sum(record["kind"] == "step" for record in metrics.read())
        if WARM_STEPS <= steps_done < STEPS:
            resident["driver"].append(driver.memory_info().rss)
            resident["gcs_server"].append(heads[0].memory_info().rss)
        time.sleep(1)
    assert run.end() == 0, run.text()
    growth = {name: max(sizes) - sizes[0] for name, sizes in resident.items()}
    print({name: f"{size / 2**20:.1f} MiB" for name, size in growth.items()})
    assert max(growth.values()) <= FLAT_BYTES, growth
