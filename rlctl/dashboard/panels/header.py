"""The head of the dashboard: which run, how far, what it does at this moment."""

from rlctl.dashboard.event_text import one_line
from rlctl.dashboard.formats import count, span, ticking
from rlctl.dashboard.panels.canvas import Row, box, row, spread
from rlctl.dashboard.state import RunState
from rlctl.run.run_dir import model_name
from rlctl.telemetry.jsonl import Record

HEIGHT = 4
SIGNS = {
    "new": ("○", "bright_black"),
    "running": ("●", "green"),
    "done": ("✔", "bold green"),
    "failed": ("✘", "bold red"),
    "interrupted": ("■", "bold yellow"),
    "stopped": ("■", "bold yellow"),
    "died": ("✘", "bold red"),
}


def header(state: RunState, width: int) -> list[Row]:
    model = model_name(str(state.start.get("model", "")))
    attempt = int(state.start.get("attempt", 1))
    aside = " · ".join(part for part in (model, f"attempt {attempt}" if attempt > 1 else "") if part)
    inner = width - 4
    content = [_progress(state, inner), spread(_doing(state), _where(state), inner)]
    return box(f"rlctl {state.algorithm} · {state.name}", content, width, HEIGHT, aside)


def _progress(state: RunState, width: int) -> Row:
    total, done = state.num_steps, state.step
    share = done / total if total else 0.0
    left = f"step {done}/{total or '?'}"
    eta = f"  eta {span(state.eta)}" if state.eta is not None else ""
    right = f"{share:4.0%}  {span(state.elapsed)}{eta}"
    room = width - len(left) - len(right) - 4
    halves = round(min(1.0, share) * room * 2)
    filled = "━" * (halves // 2) + "╸" * (halves % 2)
    colour = SIGNS[state.status][1] if state.status != "running" else "cyan"
    rest = "┈" * max(0, room - len(filled))
    return row((left, "bold"), "  ", (filled, colour), (rest, "bright_black"), "  ", right)


def _doing(state: RunState) -> Row:
    sign, style = SIGNS[state.status]
    if state.status != "running":
        reason = one_line(state.end.get("reason") or ("its process is gone" if state.status == "died" else ""))
        return row((f"{sign} {state.status}", style), f": {reason}" if reason else "")
    if state.phase is None:
        return row((f"{sign} ", style), "starting")
    name, step, since = state.phase
    at = f" of step {step}" if step else ""
    return row((f"{sign} ", style), (name.replace("_", " "), "bold"), f"{at} {ticking(state.now - since)}")


def _where(state: RunState) -> Row:
    version = state.latest("version")
    weights = "" if version is None else f"weights v{version:.0f}"
    return row((" · ".join(part for part in (weights, _processes(state.start)) if part), "bright_black"))


def _processes(start: Record) -> str:
    """How many trainer ranks and engines there are, and on GPUs what they stand on."""
    ranks, engines, devices = int(start.get("ranks", 0)), int(start.get("engines", 0)), start.get("devices") or {}
    if not ranks:
        return ""
    trainers = count(ranks, "rank")
    if not engines:
        return trainers
    if start.get("device") == "cuda" and start.get("shared"):
        gpus = max(int(devices.get(side, 1)) for side in ("trainer", "generator"))
        return f"{trainers} and {count(engines, 'engine')} on {'the same ' * (gpus > 1)}{count(gpus, 'GPU')}"
    each = int(devices.get("generator", 1)) // engines if start.get("device") == "cuda" else 1
    return f"{trainers} · {count(engines, 'engine')}" + f" x {each} GPUs" * (each > 1)
