"""One Ray for all tests with processes, and no deadlines of properties on a busy machine."""

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

from tests import durations, preloaded
from tests.durations import file_of
from tests.faults.runs import RUNS
from tests.system.clusters import Clusters

# As in the Makefile: where containers set it, each of the many processes started here would compile vLLM again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# Containers set this one, and then all output of a process arrives. Tests see the output of users, who do not have it.
os.environ.pop("PYTHONUNBUFFERED", None)
# Output is for this terminal, not for the caller's of the tests: CI services force colours.
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm"
# More threads than cores would spin while they wait for each other; a run's trainers have this too.
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
# Hypothesis and torch make millions of objects; at Python's 700 between collections unit tests take 5 to 10% longer.
gc.set_threshold(50_000)
# In a shell without job control background processes ignore Ctrl-C, and so would the processes of tests.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Hypothesis fails a test whose examples take a second to draw, too.
settings.register_profile("rlctl", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("rlctl")


SYSTEM, FAULTS = Path(__file__).parent / "system", Path(__file__).parent / "faults"
# Files that share an import of vLLM, 10 s of CPU: in the process of their tests, or in the server of engine processes.
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
SECONDS = Counter[str]()


def group_of(file: str) -> str:
    """Return the name of the group that a file is in, or the file itself."""
    for name, files in TOGETHER.items():
        if file.startswith(files):
            return name
    return file


@pytest.hookimpl(optionalhook=True)  # without xdist there is none
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Share files out one by one, those of a group together."""
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
    """Remember a lost process: the suite ends as soon as the test that it was lost in is failed by name."""
    if error:
        node.config.pluginmanager.getplugin("dsession").sched.lost = f"process {node.gateway.id} was lost: {error}"


def pytest_configure() -> None:
    preloaded.prepare()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for line in preloaded.describe_lost_servers():
        terminalreporter.write_line(line, yellow=True)


def pytest_unconfigure() -> None:
    preloaded.remove_folder()


def pytest_collection() -> None:
    """Imports leave a million objects and next to no garbage."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Later collections pass over imported modules and collected tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark slow tests. Begin the longest files first; those that go to one process stay together."""
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
    """Record in the suite's first process, which hears of all tests."""
    if session.config.getoption("record_durations") and "PYTEST_XDIST_WORKER" not in os.environ:
        durations.save(SECONDS)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Have torch compute on one thread: more than one a core wait for each other, 49 s of CPU instead of 8 in packs."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_run_goes_on() -> Iterator[None]:
    """A failing test takes its runs along: two cores are too few for the next test and an endless run."""
    begun = len(RUNS)
    yield
    for run in RUNS[begun:]:
        run.end_now()


@pytest.fixture(autouse=True)
def workers_are_preloaded(request: pytest.FixtureRequest) -> None:
    """Tests with processes have workers that begin with their imports done, unless they ask for `ordinary_workers`."""
    if request.path.is_relative_to(SYSTEM) or request.path.is_relative_to(FAULTS):
        preloaded.start_servers()


@pytest.fixture(scope="module")
def ordinary_workers() -> Iterator[None]:
    """Workers of Ray start as for a user: for tests of how processes start and end."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(preloaded.FOLDER, raising=False)
        yield


@pytest.fixture(scope="session")
def ray_here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ray on this machine for the whole session; the folder that its workers' logs go to."""
    from rlctl.launch.local_ray import local_ray

    logs = tmp_path_factory.mktemp("logs")
    with local_ray(logs):
        yield logs


@pytest.fixture
def clusters(tmp_path: Path) -> Iterator[Clusters]:
    """The user of clusters of this machine; none is left afterwards."""
    clusters = Clusters(tmp_path)
    yield clusters
    clusters.clean()
