"""Description of an event in one short line, for the dashboard and for plain lines."""

from collections.abc import Callable

from rlctl.dashboard.formats import duration, number
from rlctl.run.health import UNSCORED_ANSWERS
from rlctl.telemetry.jsonl import Record
from rlctl.utils.safe_text import neutral

STYLE = {
    "warning": "yellow",
    "error": "bold red",
    "engine_lost": "red",
    "engine_restarted": "green",
    "engine_gone": "red",
    "restart": "yellow",
    "checkpoint": "cyan",
}
# Most process ids in a line.
MOST_IDS = 16
ENDS = {"done": "green", "failed": "bold red", "interrupted": "yellow", "stopped": "yellow"}


def describe(event: Record) -> tuple[str, str]:
    """Return (text, style) of an event. The text of an unknown kind lists the event's fields."""
    kind = str(event["kind"])
    if kind == "run_ended":
        status = str(event.get("status"))
        return one_line(f"run {status}{_reason(event)}"), ENDS.get(status, "")
    words = _WORDS.get(kind)
    text = words(event) if words else f"{kind.replace('_', ' ')} {_fields(event)}"
    return one_line(text), STYLE.get(kind, "")


def one_line(text: object) -> str:
    """Return any text as one line without escape sequences, which is safe to show."""
    return neutral(" ".join(str(text).split()))


def _fields(event: Record) -> str:
    parts = []
    for key, field in event.items():
        if key not in ("kind", "time"):
            text = f"{field:.6g}" if isinstance(field, float) else str(field)
            parts.append(f"{key} {text}")
    return " ".join(parts)


def _took(event: Record) -> str:
    return f" ({duration(event['seconds'])})" if isinstance(event.get("seconds"), (int, float)) else ""


def _reason(event: Record) -> str:
    return f": {event['reason']}" if event.get("reason") else ""


def _validation(record: Record) -> str:
    """Return the text of a validation's record: its main metrics."""
    names = ["accuracy", "pass_at_k", "reward", "loss"]
    if record.get(UNSCORED_ANSWERS.name):
        names.append("failed_rewards")
    parts = []
    for name in names:
        metric = record.get(f"validation/{name}")
        if metric is not None:
            parts.append(f"{name.replace('_', ' ')} {number(metric)}")
    return f"validation of step {record.get('step')}: {', '.join(parts)}"


def _run_start(event: Record) -> str:
    done = event.get("start_step", 0)
    return f"run resumed after step {done}" if done else f"run started: {event.get('model', '')}"


def _start_up(event: Record) -> str:
    parts = ", ".join(f"{part} {duration(seconds)}" for part, seconds in dict(event.get("parts") or {}).items())
    return f"started in {duration(event['seconds'])}: {parts}"


def _chosen(event: Record) -> str:
    parts = []
    for key, field in event.items():
        if key not in ("kind", "time"):
            text = f"{field:g}" if type(field) is float else str(field).lower()
            parts.append(f"{key}={text}")
    return ", ".join(parts)


def _refit(event: Record) -> str:
    extra = float(event.get("extra_bytes", 0)) / 2**30
    memory = f", {extra:.1f} GiB beyond the weights" if extra else ""
    names = list(event.get("engines") or [])
    engines = names[0] if len(names) == 1 else f"{len(names)} engines"
    return f"refit to {engines}: {event.get('transport')}, {event.get('mode')} ({event.get('why')}){memory}"


def _processes(event: Record) -> str:
    # Each field but kind and time is a process.
    count = len(event) - 2
    if count > MOST_IDS:
        return f"process ids: of {count} processes, in events.jsonl"
    return f"process ids: {_fields(event)}"


def _role(event: Record) -> str:
    """Return the start of a line about an engine that scores: the role whose model it serves; else an empty text."""
    return f"{event['role']}'s " if "role" in event else ""


def _probe(event: Record) -> str:
    """Return the line of a probe that passed, with the error of scored tokens or the reason why there are none."""
    error = event.get("token_mult_prob_error", 0.0)
    text = f"probe: trainer and generator agree, token_mult_prob_error {error:.6f} over {event.get('tokens')} tokens"
    if "scored" in event:
        return f"{text}, {event['scored']:.6f} as scored"
    return f"{text}; not scored: {event['unscored']}" if event.get("unscored") else text


_WORDS: dict[str, Callable[[Record], str]] = {
    "run_started": _run_start,
    "started": _start_up,
    "chosen": lambda event: f"chosen: {_chosen(event)}",
    "processes": _processes,
    "checkpoint": lambda event: f"checkpoint of step {event.get('step')}{_took(event)} {event.get('path', '')}",
    "probe": _probe,
    "refit_opened": _refit,
    "validation_started": lambda event: f"validation at step {event.get('step', '')}",
    **dict.fromkeys(("dispatch", "data", "warning", "error"), lambda event: f"{event['kind']}: {event.get('what')}"),
    "validation": _validation,
    "redrawn": lambda event: f"prompt {event.get('prompt')} resampled: its group reached the bound on age",
    "engine_lost": lambda event: f"{_role(event)}engine {event.get('engine')} lost{_reason(event)}",
    "engine_restarted": lambda event: f"{_role(event)}engine {event.get('engine')} restarted{_took(event)}",
    "engine_gone": lambda event: f"{_role(event)}engine {event.get('engine')} is gone{_reason(event)}",
    "restart": lambda event: f"restart {event.get('count')} in {event.get('pause_s', 0):g} s{_reason(event)}",
    "submitted": lambda event: f"submitted to {event.get('cluster')} as job {event.get('job')}",
}
