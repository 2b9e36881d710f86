"""An event as one short line, the same words in the live view and in the plain one."""

from collections.abc import Callable

from rlctl.dashboard.formats import duration, number
from rlctl.telemetry.jsonl import Record
from rlctl.utils.escapes import neutral

STYLE = {
    "warning": "yellow",
    "error": "bold red",
    "engine_lost": "red",
    "engine_restarted": "green",
    "engine_gone": "red",
    "restart": "yellow",
    "checkpoint": "cyan",
}
FAILED_HELD_OUT = "validation/failed_rewards"
ENDS = {"done": "green", "failed": "bold red", "interrupted": "yellow", "stopped": "yellow"}


def describe(event: Record) -> tuple[str, str]:
    """(text, style) of an event; unknown kinds show their fields."""
    kind = str(event["kind"])
    if kind == "run_ended":
        status = str(event.get("status"))
        reason = event.get("reason")
        return f"run {status}" + (f": {one_line(reason)}" if reason else ""), ENDS.get(status, "")
    words = _WORDS.get(kind)
    return one_line(words(event) if words else _fields(event)), STYLE.get(kind, "")


def one_line(text: object) -> str:
    """Return a text of others as one line that is safe to show."""
    return neutral(" ".join(str(text).split()))


def _fields(event: Record) -> str:
    shown = (
        f"{key} {value:.6g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in event.items()
        if key not in ("kind", "time")
    )
    return " ".join([str(event["kind"]).replace("_", " "), *shown])


def _took(event: Record) -> str:
    return f" ({duration(event['seconds'])})" if isinstance(event.get("seconds"), (int, float)) else ""


def _reason(event: Record) -> str:
    return f": {event['reason']}" if event.get("reason") else ""


def _held_out(record: Record) -> str:
    shown = ("accuracy", "pass_at_k", "reward", "loss", *["failed_rewards"] * bool(record.get(FAILED_HELD_OUT)))
    return ", ".join(
        f"{name.replace('_', ' ')} {number(record[f'validation/{name}'])}"
        for name in shown
        if f"validation/{name}" in record
    )


def _probed(event: Record) -> str:
    error, tokens = event.get("token_mult_prob_error", 0.0), event.get("tokens")
    return f"probe: trainer and generator agree, token_mult_prob_error {error:.6f} over {tokens} tokens"


def _started(event: Record) -> str:
    done = event.get("start_step", 0)
    return f"run resumed after step {done}" if done else f"run started: {event.get('model', '')}"


def _opened(event: Record) -> str:
    extra = float(event.get("extra_bytes", 0)) / 2**30
    memory = f", {extra:.1f} GiB beside the weights" if extra else ""
    return f"refit to {event.get('engine')}: {event.get('transport')}, {event.get('mode')} ({event.get('why')}){memory}"


_WORDS: dict[str, Callable[[Record], str]] = {
    "run_started": _started,
    "checkpoint": lambda event: f"checkpoint of step {event.get('step')}{_took(event)} {event.get('path', '')}",
    "probe": _probed,
    "refit_opened": _opened,
    "dispatch": lambda event: f"dispatch: {event.get('what')}",
    "data": lambda event: f"data: {event.get('what')}",
    "validation_started": lambda event: f"validation at step {event.get('step', '')}",
    "warning": lambda event: f"warning: {event.get('what')}",
    "error": lambda event: f"error: {event.get('what')}",
    "validation": lambda event: f"validation of step {event.get('step')}: {_held_out(event)}",
    "redrawn": lambda event: f"prompt {event.get('prompt')} drawn anew: it stood at the bound on age",
    "engine_lost": lambda event: f"engine {event.get('engine')} lost" + _reason(event),
    "engine_restarted": lambda event: f"engine {event.get('engine')} restarted{_took(event)}",
    "engine_gone": lambda event: f"engine {event.get('engine')} is gone" + _reason(event),
    "restart": lambda event: f"restart {event.get('count')} in {event.get('pause_s', 0):g} s" + _reason(event),
    "submitted": lambda event: f"submitted to {event.get('cluster')} as job {event.get('job')}",
}
