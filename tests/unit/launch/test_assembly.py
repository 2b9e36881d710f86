"""Problems that are found, and told, before anything starts."""

from pathlib import Path

import pytest

from rlctl.dashboard.dashboard import render
from rlctl.dashboard.state import read_state
from rlctl.data.files import DataError
from rlctl.data.tasks import Task
from rlctl.launch.assembly import processes_of
from rlctl.launch.sampling import check_room
from rlctl.preflight.load import load
from rlctl.preflight.placement import place, requested_resources, this_machine
from rlctl.telemetry.events import EventLog


def test_a_prompt_that_leaves_no_room_for_an_answer_is_named_with_what_mends_it() -> None:
    prompts = [Task("r0", [1] * 3, "", None), Task("r1", [1] * 9, "", None)]
    check_room(prompts, answer=7, length=16)
    with pytest.raises(DataError, match=r"prompt r1 has 9 tokens; .*=8 that .* 16: data.max_prompt_length=8 leaves"):
        check_room(prompts, answer=8, length=16)


@pytest.mark.parametrize(
    ("gpus", "overrides", "expected"),
    [
        (0, ["trainer.num_ranks=2", "generation.num_engines=3"], "2 ranks · 3 engines"),
        (2, ["trainer.num_ranks=2", "generation.num_engines=2"], "2 ranks and 2 engines on the same 2 GPUs"),
        (2, ["trainer.num_ranks=2", "generation.tensor_parallel_size=2"], "2 ranks and 1 engine on the same 2 GPUs"),
        (6, ["trainer.num_ranks=2", "generation.tensor_parallel_size=2", "generation.num_engines=2",
             "placement.colocated=false"], "2 ranks · 2 engines x 2 GPUs"),
        (3, ["async.enabled=true", "generation.num_engines=2"], "1 rank · 2 engines"),
    ],
)  # fmt: skip
def test_the_dashboard_counts_the_ranks_and_engines_of_a_placement(
    tmp_path: Path, gpus: int, overrides: list[str], expected: str
) -> None:
    placement = place(this_machine(gpus), requested_resources(load("grpo", "grpo-tiny", overrides).settled))
    EventLog(tmp_path / "events.jsonl").emit("run_started", num_steps=1, **processes_of(placement))
    row = render(read_state(tmp_path), 80, 24).rows[2]
    assert "".join(segment.text for segment in row).endswith(f" {expected} │")
