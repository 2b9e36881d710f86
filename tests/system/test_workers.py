"""Workers: errors carry the worker's name and traceback, a dead or silent process is an error, never a wait."""

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlctl.workers.errors import WorkerDied, WorkerError, WorkerTimeout
from rlctl.workers.group import WorkerGroup, WorkerSpec


@dataclass(frozen=True)
class Probe:
    """A worker that does what it is told."""

    rank: int

    def __call__(self) -> "Probe":
        return self

    def add(self, x: int, y: int = 0) -> int:
        return self.rank + x + y

    def fail_on(self, rank: int) -> str:
        if self.rank == rank:
            raise ValueError(f"rank {rank} was told to fail")
        return "fine"

    def die_on(self, rank: int) -> None:
        if self.rank == rank:
            os._exit(7)
        time.sleep(30)

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

    def say(self, text: str) -> None:
        print(text)
        os.system(f"echo {text} from a child")


@pytest.fixture
def group(ray_here: Path) -> Iterator[WorkerGroup]:
    specs = [WorkerSpec(f"probe-{rank}", Probe(rank), log=str(ray_here / f"probe-{rank}.log")) for rank in (0, 1)]
    workers = WorkerGroup(specs, deadline_s=60)
    workers.built().wait(60)
    yield workers
    workers.kill()


def test_results_come_in_rank_order(group: WorkerGroup) -> None:
    assert group.call("add", 10, y=5) == [15, 16]
    assert group.scatter("add", [(1,), (2,)]).wait(60) == [1, 3]


def test_an_error_names_the_worker_and_leaves_it_usable(group: WorkerGroup) -> None:
    with pytest.raises(WorkerError, match="fail_on on probe-1: ValueError: rank 1 was told to fail") as error:
        group.call("fail_on", 1)
    assert "in fail_on" in error.value.tracebacks()
    assert group.call("fail_on", 2) == ["fine", "fine"]


def test_a_death_shows_at_once_though_the_other_rank_still_works(group: WorkerGroup) -> None:
    begin = time.monotonic()
    with pytest.raises(WorkerDied) as error:
        group.call("die_on", 1)
    assert error.value.workers == ["probe-1"]
    assert time.monotonic() - begin < 15


def test_a_silent_worker_is_an_error_that_names_it_and_the_knob(group: WorkerGroup) -> None:
    with pytest.raises(WorkerTimeout, match=r"probe-0 to finish sleep; .* raise run.deadline_s"):
        group.scatter("sleep", [(20,), (0,)]).wait(0.5)


def test_a_worker_that_cannot_be_built_says_why(ray_here: Path) -> None:
    workers = WorkerGroup([WorkerSpec("broken", Broken())], deadline_s=60)
    with pytest.raises(WorkerError, match="start-up on broken: OSError: no such model"):
        workers.built().wait(60)
    workers.kill()


@dataclass(frozen=True)
class Broken:
    def __call__(self) -> None:
        raise OSError("no such model")


def test_a_signal_makes_a_worker_say_where_it_is(group: WorkerGroup, ray_here: Path) -> None:
    sleeping = group.start("sleep", 2.0)
    time.sleep(0.5)
    os.kill(group.workers[0].pid(), signal.SIGUSR1)
    sleeping.wait(30)
    assert "in sleep" in (ray_here / "probe-0.log").read_text()
    assert "in sleep" not in (ray_here / "probe-1.log").read_text()


def test_all_output_of_a_worker_goes_to_its_own_log(group: WorkerGroup, ray_here: Path) -> None:
    group.call("say", "hello")
    text = (ray_here / "probe-1.log").read_text()
    assert "hello\n" in text
    assert "hello from a child" in text
