"""How the driver talks to processes. Ray reads its environment at import, so it is set here, before any part."""

import os

ENVIRONMENT = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    # Workers at the driver's own priority: at Ray's default nice 15 they starve beside it on few cores.
    "RAY_worker_niceness": "0",
    # Workers choose their devices by the run's placement, not by Ray's.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    # A thread that still waits for an answer after the end starts no new Ray for it.
    "RAY_ENABLE_AUTO_CONNECT": "0",
    # Memory of other programs on the machine is not ours to answer for.
    "RAY_memory_monitor_refresh_ms": "0",
}
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)
