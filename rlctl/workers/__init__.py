"""Processes of a run, and calls between them. Ray reads its environment at import, so it is set here first."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Workers run at the driver's priority. At Ray's default, nice 15, they starve on few cores.
    "RAY_worker_niceness": "0",
    # Workers choose their devices by the run's placement, not by Ray's.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A thread that still waits for an answer after Ray's shutdown must not start Ray again.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Ray must not kill workers because other programs use the machine's memory.
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray's head would store every call, 30 KiB in each step, for `ray list tasks`. rlctl does not use that list.
    "RAY_task_events_report_interval_ms": "0",
    # Ray's metrics can be read without the token, so nodes collect none. The head's two metrics servers cannot be
    # switched off, so they get a port that does not exist.
    "RAY_enable_metrics_collection": "0",
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
}
# By default Ray listens on all interfaces. This switch, meant for systems on which Ray supports only one machine, makes
# Ray and its drivers listen on loopback only.
LOOPBACK_ONLY = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
for _name, _setting in ENVIRONMENT.items():
    os.environ.setdefault(_name, _setting)


@contextmanager
def changed_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within the block."""
    earlier_values = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in earlier_values.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value
