"""A Ray that comes up too slowly, as on a busy machine, is given up whole and tried once more."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.usefixtures("ordinary_workers")

PROGRAM = """
import sys
import time
from pathlib import Path

# First, since it sets what Ray reads at its import.
from rlctl.launch.local_ray import local_ray
import ray

start = ray.init
folders = []
lost = []

def init(**options):
    start(**options)
    folders.append(Path(options["_temp_dir"]))
    if len(folders) == 1:
        raise Exception("The current node timed out during startup.")

ray.init = init
try:
    with local_ray(Path(sys.argv[1]), lost.append):
        time.sleep(2)
        print("up", len(folders), [folder.exists() for folder in folders], ray.is_initialized(), lost)
finally:
    print("down", [folder.exists() for folder in folders], ray.is_initialized())
"""


@pytest.mark.long  # rare
def test_a_slow_start_is_tried_again_and_nothing_of_it_is_left(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)
    assert done.stdout.splitlines() == ["up 2 [False, True] True []", "down [False, False] False"], done.stderr
