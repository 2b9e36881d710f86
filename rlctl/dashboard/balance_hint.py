"""Advice in one line on how an asynchronous run divides its devices. Pure."""

from rlctl.dashboard.state import RunState
from rlctl.telemetry.throughput import split

RECENT = 20
# A division that saves less of a step than this is not worth a restart.
WORTH = 0.08
# Waiting for the oldest group for more than this share of a step is due to the bound, not to the division.
WAITING = 0.15


def hint(state: RunState) -> str:
    """Return the change to make, with the figures behind it; empty where nothing would help, or too little is known."""
    idle = {side: state.mean(f"idle/{side}", RECENT) for side in ("trainer", "generator")}
    if idle["trainer"] is None or idle["generator"] is None or len(state.steps) < 5:
        return ""
    share = dict(split(state.steps.recent(RECENT))).get("idle_oldest", 0.0)
    if share > WAITING:
        return f"trainer waits {share:.0%} for stragglers: raise async.max_trajectory_age_steps"
    devices = state.start.get("devices") or {}
    now = (int(devices.get("trainer", 1)), int(devices.get("generator", 1)))
    best, saved = better_division(now, 1 - idle["trainer"], 1 - idle["generator"])
    if saved < WORTH:
        return ""
    side = "trainer" if idle["trainer"] >= idle["generator"] else "generator"
    division = f"{best[0]} to train and {best[1]} to generate"
    return f"{side} idle {idle[side]:.0%}: {division} would save {saved:.0%} of a step"


def better_division(now: tuple[int, int], trainer: float, generator: float) -> tuple[tuple[int, int], float]:
    """Return ((trainer's devices, engines' devices), share of a step saved) of the best division of the same devices.

    now: the present division. trainer, generator: shares of the step in which each side is busy. The devices of a side
    are taken to share its work evenly; the slower side sets the pace.
    """
    work = (now[0] * trainer, now[1] * generator)
    num_devices = sum(now)

    def pace(train: int) -> float:
        return max(work[0] / train, work[1] / (num_devices - train))

    present = pace(now[0])
    best = min(range(1, num_devices), key=lambda train: (pace(train), abs(train - now[0])), default=now[0])
    saved = 1 - pace(best) / present if present > 0 else 0.0
    return (best, num_devices - best), saved
