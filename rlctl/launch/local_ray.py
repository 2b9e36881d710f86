"""Ray for the driver: a connection to a cluster's Ray (`ray_session`), or a private Ray of one run (`local_ray`).

A private Ray starts and ends with the driver. It authenticates by token, its dashboard is off, and its messages go to
the run's log folder.
"""

import itertools
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import psutil

from rlctl.launch import idle_agent
from rlctl.preflight.placement import PlacementError
from rlctl.utils.devices import usable_cores
from rlctl.utils.ports import LOOPBACK
from rlctl.utils.ray_token import TOKEN_FILE, token_of_process, write_token
from rlctl.workers import LOOPBACK_ONLY, changed_environment
from rlctl.workers.preloading import ForkServer
from rlctl.workers.reaper import SHARED_MEMORY, Reaper, free_bytes

_OBJECT_STORE_BYTES = 1 << 30
# Ray refuses a smaller object store.
_LEAST_STORE_BYTES = 75 << 20
# Seconds that Ray waits for its own node to start, a constant in Ray's code. They are too few on a busy machine.
_ATTEMPT_S = 30.0
_ATTEMPTS = 2
# Most bytes in the path of a Unix socket.
_SOCKET_BYTES = 107
# Bytes that Ray adds to that path below the temporary folder.
_RAYS_BYTES = 84
# Processes without which a driver cannot go on.
_NEEDED_NAMES = ("gcs_server", "raylet")
# Seconds between two checks of these processes.
_LOOK_S = 0.5
# Seconds that a run on a cluster has to end by itself after its machine's raylet is gone.
_GIVE_UP_S = 20.0
# Methods of Ray's Node that start the autoscaler, the log monitor and the dashboard's server.
_UNUSED = ("start_monitor", "start_log_monitor", "start_api_server")
# Name of the function by which Ray starts each of its processes.
_STARTER = "start_ray_process"
# Raylet option with an agent's command -> names of the ports that this agent must report.
_AGENT_PORTS = {
    "--dashboard_agent_command": ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "--runtime_env_agent_command": ("runtime_env_agent_port",),
}
_CLUSTER_SWITCH = "ENABLE_RAY_CLUSTER"
_TOO_SLOW = "timed out during startup"


class RayTooSlow(RuntimeError):
    """Ray's own processes did not start within Ray's own time limit."""


@contextmanager
def ray_session(logs: Path, *, loopback: bool = False, **options: Any) -> Iterator[dict[str, Any]]:
    """Connect by `ray.init(**options)` until the block is left. Yields Ray's `address_info` of the connection.

    Ray's messages go to ray.log in `logs`. loopback: Ray and the driver listen on the loopback interface only.
    """
    import rlctl.workers  # noqa: F401  (sets what Ray reads at its import)
    import ray  # isort: skip

    logs.mkdir(parents=True, exist_ok=True)
    logger = logging.getLogger("ray")
    logger.handlers = [logging.FileHandler(logs / "ray.log")]
    logger.propagate = False
    try:
        with _loopback_switch(loopback), _own_signals():
            context = ray.init(log_to_driver=False, configure_logging=False, **options)
        yield getattr(context, "address_info", {})
    finally:
        ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Keep this process's SIGTERM handler in the block, and block SIGHUP for the processes that the block starts.

    Ray's own SIGTERM handler would end the process at once, without a message. A closed terminal sends SIGHUP to all
    its processes, which would end Ray's processes before the run is saved. So SIGHUP is blocked on this thread, and
    Ray's processes inherit the mask, as they inherit Ray's mask of SIGINT. In this process another thread receives the
    signal, or the signal waits until the block is left.
    """
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        with _replace_private("ray._private.utils", "set_sigterm_handler", lambda _: None):
            yield
    finally:
        # If this Ray has no such private function, Ray has set its own handler: set ours again.
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _loopback_switch(loopback: bool) -> Iterator[None]:
    """Set Ray's private constant that decides about loopback. Ray may be imported already, so a variable comes too
    late.

    A Ray without this constant follows only the environment variable (`LOOPBACK_ONLY`).
    """
    constants = "ray._private.ray_constants"
    clustered = _private(constants, _CLUSTER_SWITCH)
    with _replace_private(constants, _CLUSTER_SWITCH, clustered and not loopback):
        yield


def _private(module: str, name: str) -> Any:
    """Return a private object of Ray; None if this version of Ray does not have it."""
    with suppress(ImportError):
        return getattr(import_module(module), name, None)
    return None


@contextmanager
def _replace_private(module: str, name: str, replacement: Any) -> Iterator[None]:
    """Replace a private object of Ray in the block. If this version of Ray does not have it, change nothing."""
    original = _private(module, name)
    if original is None:
        yield
        return
    setattr(import_module(module), name, replacement)
    try:
        yield
    finally:
        setattr(import_module(module), name, original)


@contextmanager
def local_ray(
    logs: Path,
    lost: Callable[[str], None] = lambda reason: None,
    deadline_s: float = 0.0,
    forks: ForkServer | None = None,
) -> Iterator[Reaper]:
    """Run a private Ray until the block is left. Yields the reaper, which removes Ray's folders even if the driver is
    killed.

    A start that exceeds Ray's own 30 s is repeated once, and again while another attempt would end before `deadline_s`
    (a run's `run.deadline_s`). Raises RayTooSlow after the last attempt. lost: called once, on another thread, with the
    reason, when a process that Ray needs is gone. forks: server that forks Ray's workers; None: they start as usual.
    """
    with ExitStack() as stack:
        reaper = Reaper()
        stack.callback(reaper.close)
        # All attempts use one token, because Ray reads the token once per process.
        token = stack.enter_context(reaper.folder("rlctl-token-")) / "token"
        write_token(token, token_of_process())
        os.environ[TOKEN_FILE] = str(token)
        begin = time.monotonic()
        for attempt in itertools.count(1):
            started = stack.enter_context(ExitStack())
            try:
                folder = started.enter_context(reaper.folder("rlctl-", _root()))
                session = ray_session(
                    logs,
                    loopback=True,
                    include_dashboard=False,
                    num_cpus=usable_cores(),
                    **_object_store(folder),
                    # Ray makes its folder readable to everybody. So it is inside the run's folder, which no other user
                    # can enter.
                    _temp_dir=str(folder / "r"),
                    _node_ip_address=LOOPBACK,
                )
                with changed_environment(_ray_environment(folder)), _changed_processes(forks, folder):
                    started.enter_context(session)
                break
            except Exception as error:
                started.close()
                if _TOO_SLOW not in str(error):
                    raise
                spent = time.monotonic() - begin
                if attempt >= _ATTEMPTS and spent + _ATTEMPT_S > deadline_s:
                    raise RayTooSlow(_too_slow(attempt, spent, deadline_s, logs)) from error
        stack.enter_context(_watch_processes(_needed_processes(), lost))
        yield reaper


def _too_slow(attempts: int, spent_s: float, deadline_s: float, logs: Path) -> str:
    tried = f"Ray did not start within its own {_ATTEMPT_S:.0f} s, {attempts} times in {spent_s:.0f} s"
    knob = f", or raise run.deadline_s={deadline_s:g}" if deadline_s else ""
    return f"{tried}: this machine is too busy or too slow for it; end other programs{knob}. Ray's log: {logs}/ray.log"


@contextmanager
def _watch_processes(
    processes: Mapping[str, psutil.Process], lost: Callable[[str], None], give_up: Callable[[], None] | None = None
) -> Iterator[None]:
    """Watch the processes of Ray's head and of this machine's raylet until the block is left.

    If one dies, the driver goes on for a minute, and then Ray ends the driver without a message. lost: called once with
    the reason. give_up: called if the raylet is gone and the block is not left within 20 s. All of Ray's processes on
    this machine have ended by then, and nothing else would tell the driver.
    """
    block_left = threading.Event()

    def look() -> None:
        is_reported = False
        while not block_left.wait(_LOOK_S):
            gone = [name for name, process in processes.items() if not _lives(process)]
            if gone and not is_reported:
                is_reported = True
                lost(f"Ray's {gone[0]} (process {processes[gone[0]].pid}) is gone")
            if "raylet" in gone and give_up and not block_left.wait(_GIVE_UP_S):
                give_up()
                return
            # With give_up the thread goes on: the raylet may end after the head.
            if gone and not give_up:
                return

    thread = threading.Thread(target=look, name="ray-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        block_left.set()
        thread.join()


def watch_node(
    connection: Mapping[str, Any], lost: Callable[[str], None], give_up: Callable[[], None]
) -> AbstractContextManager[None]:
    """Watch a cluster's Ray processes on this machine, see `_watch_processes`. connection: facts yielded by
    `ray_session`.
    """
    # This machine may have Ray processes of other clusters. Those of this one name its session or socket.
    marks = {"gcs_server": connection.get("session_dir"), "raylet": connection.get("raylet_socket_name")}
    processes = {}
    for process in psutil.process_iter(["name", "cmdline"]):
        name = process.info["name"]
        mark = marks.get(name)
        if mark and any(mark in argument for argument in process.info["cmdline"] or ()):
            processes[name] = process
    return _watch_processes(processes, lost, give_up)


def _needed_processes() -> dict[str, psutil.Process]:
    """Return name -> process, of the live processes of this driver's Ray.

    A failed attempt to start Ray leaves dead processes with the same names.
    """
    processes = {}
    for process in sorted(psutil.Process().children(), key=psutil.Process.create_time):
        with suppress(psutil.NoSuchProcess):
            name = process.name()
            if name in _NEEDED_NAMES and _lives(process):
                processes[name] = process
    return processes


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _root() -> str:
    """Return the folder in which Ray's folder is created: the temporary folder, or /tmp if its path is too long for
    sockets.
    """
    folder = tempfile.gettempdir()
    return folder if len(os.fsencode(folder)) <= _SOCKET_BYTES - _RAYS_BYTES else "/tmp"


def _object_store(folder: Path) -> dict[str, Any]:
    """Return Ray's options for its object store: in shared memory, or on disk if shared memory is too small.

    The store gets at most half of the free bytes of either.
    """
    room = free_bytes(SHARED_MEMORY) // 2
    if room >= _LEAST_STORE_BYTES:
        return {"object_store_memory": min(_OBJECT_STORE_BYTES, room)}
    room = free_bytes(folder) // 2
    if room < _LEAST_STORE_BYTES:
        least_room = f"{2 * _LEAST_STORE_BYTES >> 20} MiB free"
        raise PlacementError(
            f"neither {SHARED_MEMORY} nor {folder.parent} has room for Ray's object store, which needs {least_room}: "
            "free some, set TMPDIR to a larger folder, or in a container: docker run --shm-size=2g"
        )
    return {"object_store_memory": min(_OBJECT_STORE_BYTES, room), "_plasma_directory": str(folder)}


@contextmanager
def _changed_processes(forks: ForkServer | None, folder: Path) -> Iterator[None]:
    """Keep a Ray that starts in the block from starting processes that a private Ray does not need.

    forks: server that forks the workers; None: they start as usual. folder: this Ray's own.

    The processes are an autoscaler, a log monitor that sends output to the driver, the server of a disabled dashboard,
    and two node agents on whose ports a start waits. They take 5 s of CPU at every start, and Ray has no option against
    them. The replaced methods are private. A Ray without such a method starts as usual.
    """
    try:
        from ray._private import services
        from ray._private.node import Node
    except ImportError:
        yield
        return

    def change(option: str) -> str:
        changed_option = _with_idle_agent(option)
        return _with_forked_workers(changed_option, forks, folder) if forks else changed_option

    with ExitStack() as stack:
        for name in filter(partial(hasattr, Node), _UNUSED):
            stack.callback(setattr, Node, name, getattr(Node, name))
            setattr(Node, name, lambda self, *arguments, **options: None)
        if hasattr(services, _STARTER):
            start = getattr(services, _STARTER)
            stack.callback(setattr, services, _STARTER, start)
            setattr(services, _STARTER, partial(_start_changed, start, change))
        yield


def _start_changed(
    start: Callable[..., Any], change: Callable[[str], str], command: list[str], *arguments: Any, **options: Any
) -> Any:
    """Start a process of Ray by calling `start`, with each word of its command changed."""
    return start([change(word) for word in command], *arguments, **options)


def _with_forked_workers(option: str, forks: ForkServer, folder: Path) -> str:
    """Return a raylet's option, changed so that `forks` forks the workers, and none is started before it is asked for.

    A driver's connection waits for workers that are started before, and so for their imports.
    """
    name, _, value = option.partition("=")
    if name == "--num_prestart_python_workers":
        return f"{name}=0"
    if name == "--python_worker_command":
        return f"{name}={subprocess.list2cmdline(forks.command(shlex.split(value), folder))}"
    return option


def _with_idle_agent(option: str) -> str:
    """Return a raylet's option. In an option with an agent's command the command is replaced by an idle agent's."""
    name, _, command = option.partition("=")
    if name not in _AGENT_PORTS:
        return option
    agent_options = dict(word.split("=", 1) for word in shlex.split(command) if "=" in word)
    if "--session-dir" not in agent_options or "--node-id" not in agent_options:
        return option
    program = [sys.executable, "-S", "-E", idle_agent.__file__]
    agent = [*program, agent_options["--session-dir"], agent_options["--node-id"], *_AGENT_PORTS[name]]
    return f"{name}={subprocess.list2cmdline(agent)}"


def _ray_environment(folder: Path) -> dict[str, str]:
    """Return the environment variables for Ray's processes. The run's processes inherit them."""
    # By default gloo and NCCL listen at the address of the host's name.
    interfaces = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_HOST_IP": LOOPBACK}
    # By default Ray ends the driver a minute after its head is gone, without a message and in the middle of a step.
    patience = {"RAY_gcs_rpc_server_reconnect_timeout_s": "86400"}
    # Engines leave files, such as compiled kernels, in TMPDIR. They are removed with this folder.
    return LOOPBACK_ONLY | interfaces | patience | {"TMPDIR": str(folder)}
