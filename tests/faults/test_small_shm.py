"""A machine with 64 MiB of shared memory, as Docker gives: a run works, with its object store elsewhere."""

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.faults.runs import Run, survivors

PRIVATE = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"', "sh"]
STORE = """
import json, sys
from pathlib import Path
from rlctl.launch.local_ray import _object_store
from rlctl.launch.sampling import shared_memory
print(json.dumps([_object_store(Path(sys.argv[1])), shared_memory(1 << 20), shared_memory(1 << 26)]))
"""


@pytest.fixture(autouse=True)
def private_mounts() -> None:
    trial = subprocess.run([*PRIVATE, "true"], capture_output=True, text=True)
    if trial.returncode:
        pytest.skip(f"a private mount namespace needs root: {trial.stderr.strip()}")


def test_ray_and_weights_that_do_not_fit_into_shared_memory_go_to_the_disk(tmp_path: Path) -> None:
    program = subprocess.run([*PRIVATE, sys.executable, "-c", STORE, str(tmp_path)], capture_output=True, text=True)
    store, folder_of_a_mib, folder_of_64_mib = json.loads(program.stdout)
    assert store["_plasma_directory"] == str(tmp_path)
    assert store["object_store_memory"] >= 75 << 20
    assert (folder_of_a_mib, folder_of_64_mib) == ("/dev/shm", None)


@pytest.mark.long  # two whole starts; the parts: above, and tests/unit/workers/test_reaper.py
def test_a_run_trains_and_what_it_leaves_when_all_of_it_is_killed_is_removed_by_the_next(tmp_path: Path) -> None:
    settings = ("grpo.num_steps=100000", "validation.every=0", "checkpoint.every=0")
    run = Run(tmp_path, "docker", *settings, within=PRIVATE)
    run.wait_for_step(3)
    pid = run.process.pid
    family = psutil.Process(pid).children(recursive=True)
    for reaper in [process for process in family if "reaper.py" in " ".join(process.cmdline())]:
        with suppress(psutil.NoSuchProcess):
            reaper.kill()
    run.kill()

    next_run = Run(tmp_path, "next", "grpo.num_steps=1", "validation.every=0", "checkpoint.every=0")
    assert next_run.end() == 0, next_run.text()
    messages = [event["what"] for event in next_run.events() if "what" in event]
    removals = [message for message in messages if "removed what a killed run left" in message]
    assert any(f"of process {pid}" in removal for removal in removals)
    assert survivors(family) == []
    owners = [path.read_text() for path in Path("/tmp").glob("rlctl-*/.owner")]
    assert f"process {pid}" not in owners
