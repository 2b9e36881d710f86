"""Advice in one line on how an asynchronous run should divide its devices between trainer and engines. Pure."""

from rlctl.dashboard.state import RunState
from rlctl.telemetry.throughput import split

# Number of last steps whose means are used.
RECENT = 20
# Least share of a step that a new division must save to be worth a restart.
WORTH = 0.08
# If the trainer waits longer than this share of a step for the oldest group, or for the teacher's engines, that is the
# cause, not the division of devices.
WAITING = 0.15


def hint(state: RunState) -> str:
    """Return the change to make with its figures; empty if no change would help, or if too few steps are known."""
    idle = {side: state.mean(f"idle/{side}", RECENT) for side in ("trainer", "generator")}
    if idle["trainer"] is None or idle["generator"] is None or len(state.steps) < 5:
        return ""
    shares = dict(split(state.steps.recent(RECENT)))
    teacher_share = shares.get("idle_teacher", 0.0)
    if teacher_share > WAITING:
        return f"trainer waits {teacher_share:.0%} for the teacher: raise teacher.num_engines"
    straggler_share = shares.get("idle_oldest", 0.0)
    if straggler_share > WAITING:
        return f"trainer waits {straggler_share:.0%} for stragglers: raise async.max_trajectory_age_steps"
    devices = state.start.get("devices") or {}
    now = (int(devices.get("trainer", 1)), int(devices.get("generator", 1)))
    best, saved = better_division(now, trainer_busy=1 - idle["trainer"], generator_busy=1 - idle["generator"])
    if saved < WORTH:
        return ""
    idler_side = "trainer" if idle["trainer"] >= idle["generator"] else "generator"
    division = f"{best[0]} to train and {best[1]} to generate"
    return f"{idler_side} idle {idle[idler_side]:.0%}: {division} would save {saved:.0%} of a step"


def better_division(now: tuple[int, int], trainer_busy: float, generator_busy: float) -> tuple[tuple[int, int], float]:
    """Return ((trainer's devices, engines' devices), saved share of a step) for the best division of all devices.

    now: present division. trainer_busy, generator_busy: share of a step in which the side is busy. Assumes that the
    devices of a side share its work evenly, and that a step takes as long as its slower side.
    """
    # Devices that each side would keep busy for the whole step.
    trainer_work = now[0] * trainer_busy
    generator_work = now[1] * generator_busy
    num_devices = sum(now)

    def step_length(num_train: int) -> float:
        """Return the busy time of the slower side, as a share of the present step, if `num_train` devices train."""
        return max(trainer_work / num_train, generator_work / (num_devices - num_train))

    present = step_length(now[0])
    # If several divisions are equally good, choose the one closest to the present one.
    sizes = range(1, num_devices)
    best = min(sizes, key=lambda num_train: (step_length(num_train), abs(num_train - now[0])), default=now[0])
    saved = 1 - step_length(best) / present if present > 0 else 0.0
    return (best, num_devices - best), saved
