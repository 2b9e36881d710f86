"""Fixtures and hooks of the whole suite: one Ray for all tests with processes, order of files, environment."""

import gc
import os
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from rlctl.launch.worker_imports import SHARED_SERVER
from rlctl.workers.preloading import ForkServer
from tests import durations, preloaded
from tests.durations import file_of
from tests.faults.runs import RUNS
from tests.system.clusters import Clusters

# Some containers set this variable. Each of the many processes started here would then compile vLLM's sources again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Some containers set this variable, so that no output of a process is buffered. Tests must see the output as users do,
# who do not set it.
os.environ.pop("PYTHONUNBUFFERED", None)
# Output must not depend on the terminal of the suite. CI services, for example, force colours.
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm"
# If there are more threads than cores, waiting threads would spin. Trainers of a run set this variable too.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Collect garbage less often than Python, which does it every 700 new objects. Hypothesis and torch make millions of
# objects, and unit tests took 5 to 10% longer.
gc.set_threshold(50_000)
# In a shell without job control a suite in the background ignores Ctrl-C, and processes of tests would inherit this.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Besides deadlines, Hypothesis fails a test whose examples take a second to draw: `too_slow`.
settings.register_profile("rlctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rlctl")


SYSTEM, FAULTS = Path(__file__).parent / "system", Path(__file__).parent / "faults"
# Groups of files that run in one process, to import vLLM only once. The import takes 10 s of CPU.
TOGETHER = {
    "vllm": (
        "tests/unit/generation/vllm/",
        "tests/unit/preflight/test_engine_limits.py",
        "tests/unit/utils/test_ports.py",
        "tests/system/test_layout.py",
        "tests/system/test_tool_parsers.py",
    ),
    "engine processes": (
        "tests/system/test_greedy_answers.py",
        "tests/system/test_model_check.py",
        "tests/system/test_unusual_folders.py",
        "tests/system/test_zoo.py",
    ),
}


# Seconds of each test in this session.
# More workers than any Ray of the suite starts.
MANY_WORKERS = 100_000
SECONDS = Counter[str]()


def group_of(file: str) -> str:
    """Return the name of the group that a file is in, or the file itself."""
    for name, files in TOGETHER.items():
        if file.startswith(files):
            return name
    return file


@pytest.hookimpl(optionalhook=True)  # without xdist there is none
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Return xdist's scheduler that gives files to processes one by one, and files of a group to the same process."""
    from xdist.scheduler import LoadFileScheduling

    class ByGroups(LoadFileScheduling):  # type: ignore[misc]
        """The scheduler of --dist loadfile, with groups of several files. A lost process ends the suite.

        xdist gives the rest of its file to a new process, with the test that it was lost in. Where this is the last
        test of the last file, the new process waits without end for one that follows.
        """

        lost: str | None = None

        @property
        def tests_finished(self) -> bool:
            # xdist asks after each event of its processes.
            if self.lost:
                raise pytest.Session.Interrupted(self.lost)
            finished: bool = super().tests_finished
            return finished

        def _split_scope(self, nodeid: str) -> str:
            return group_of(file_of(nodeid))

    return ByGroups(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Remember that a process was lost. The suite ends once the test that lost it is reported as failed."""
    if error:
        node.config.pluginmanager.getplugin("dsession").sched.lost = f"process {node.gateway.id} was lost: {error}"


def pytest_configure() -> None:
    preloaded.prepare()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in preloaded.describe_lost_stages():
        terminalreporter.write_line(line, yellow=True)


def pytest_unconfigure() -> None:
    preloaded.remove_folder()


def pytest_collection() -> None:
    """Collect no garbage during imports, which make a million objects and hardly any garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude imported modules and collected tests from later garbage collections."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests. Sort files so that the longest begin first and files of a group are together."""
    recorded = durations.load()
    seconds = Counter[str]()
    for file, spent in recorded["files"].items():
        seconds[group_of(file)] += spent
    for item in items:
        if item.nodeid in recorded["tests"]:
            item.add_marker("slow")
    items.sort(key=lambda item: -seconds[group_of(file_of(item.nodeid))])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-durations", action="store_true", help="record the seconds of each file")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    SECONDS[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Record the durations, in the suite's first process, which gets the reports of all tests."""
    if session.config.getoption("record_durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        durations.save(SECONDS)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Let torch compute on one thread. Threads of several tests wait for each other: 49 s of CPU instead of 8 s."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_run_goes_on() -> Iterator[None]:
    """End runs that a failed test left behind, because the next test would be too slow next to an endless run."""
    begun = len(RUNS)
    yield
    for run in RUNS[begun:]:
        run.end_now()


@pytest.fixture(autouse=True)
def workers_are_preloaded(request: pytest.FixtureRequest) -> None:
    """Start workers with their imports done, in all tests with processes that do not use `ordinary_workers`."""
    if request.path.is_relative_to(SYSTEM) or request.path.is_relative_to(FAULTS):
        preloaded.start()


@pytest.fixture(scope="module")
def ordinary_workers() -> Iterator[None]:
    """Start each run's own server of workers, as for a user, to test how processes start and end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(SHARED_SERVER, raising=False)
        yield


@pytest.fixture(scope="session")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Start Ray on this machine for the whole session. Return the folder for logs of workers."""
    from rlctl.launch.local_ray import local_ray

    logs = tmp_path_factory.mktemp("logs")
    forks = None
    if SHARED_SERVER in os.environ:
        # Any worker may be a trainer, and those of vLLM's stage compile nothing.
        preloaded.start()
        forks = ForkServer(Path(os.environ[SHARED_SERVER]), [MANY_WORKERS])
    with local_ray(logs, forks=forks):
        yield logs


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    """Return a starter of clusters on this machine. Clusters that are left after the test are ended."""
    clusters = Clusters(tmp_path)
    yield clusters
    clusters.clean()
