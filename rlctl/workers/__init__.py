"""Processes of a run, and calls between them. Ray reads its environment at import, so it is set here first."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Workers at the driver's own priority: at Ray's default nice 15 they starve on few cores.
    "RAY_worker_niceness": "0",
    # Workers choose their devices by the run's placement, not by Ray's.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A thread that still waits for an answer after the end must not start a new Ray.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # A run does not answer for the memory of other programs on the machine.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's head would remember every call, at 30 KiB a step, for `ray list tasks`. Nothing in rlctl asks for them.
    "RAY_task_events_report_interval_ms": "0",
    # Ray's metrics are readable without the token: nodes collect none. The head's two metrics servers have no switch,
    # and are given a port that does not exist.
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
# Ray assumes that other machines reach any address, and then listens on all interfaces. This switch, meant for systems
# on which Ray runs on one machine alone, keeps it and its drivers on loopback.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
for _name, _setting in ENVIRONMENT.items():
    os.environ.setdefault(_name, _setting)


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables for the time of the block."""
    earlier_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in earlier_values.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
