"""Groups of rollouts and configs as the texts, tables and pairs that trackers take."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlctl.telemetry.jsonl import Record

# Columns of a table that has one row for each rollout.
COLUMNS = ("step", "task", "rollout", "prompt", "answer", "text", "reward", "advantage", "finish", "tokens")


def rows(step: int, groups: Sequence[Record]) -> list[list[Any]]:
    """Return a table with the columns `COLUMNS` and one row for each rollout."""
    table: list[list[Any]] = []
    for group in groups:
        for rollout in group["rollouts"]:
            cells = {
                "step": step,
                "task": group["task"],
                "rollout": rollout.get("index"),
                "prompt": group.get("prompt"),
                "answer": group.get("answer"),
                "text": text_of(rollout),
            }
            cells |= {key: rollout.get(key) for key in ("reward", "advantage", "finish", "tokens")}
            table.append([cells[column] for column in COLUMNS])
    return table


def as_text(groups: Sequence[Record]) -> str:
    """Return groups as text to read: for each group its prompt, then each rollout's scores and its text."""
    return "\n\n".join(_group_text(group) for group in groups)


def text_of(rollout: Record) -> str:
    """Return a rollout's text after the prompt. Text that the policy did not sample is in brackets ⟦ ⟧."""
    return "".join(text if sampled else f"⟦{text}⟧" for text, sampled in rollout.get("text", ()))


def flat(config: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) for each leaf of a config. An entry of a list has its index as the key."""
    for name, value in config.items():
        children = dict(enumerate(value)) if isinstance(value, list) else value
        full = f"{key}.{name}" if key else str(name)
        if isinstance(children, dict) and children:
            yield from flat(children, full)
        else:
            yield full, value


def _group_text(group: Record) -> str:
    """Return one group as text, see `as_text`."""
    outcome = f", {group['outcome']}" if group.get("outcome") else ""
    lines = [f"=== {group['task']}{outcome}, answer {group.get('answer')}", str(group.get("prompt", ""))]
    for rollout in group["rollouts"]:
        scores = [f"{key} {rollout[key]:.3g}" for key in ("reward", "advantage") if rollout.get(key) is not None]
        score_text = ", ".join(scores) or "no reward"
        lines.append(
            f"--- {rollout.get('index')}: {score_text}, {rollout.get('tokens')} tokens, {rollout.get('finish')}"
        )
        lines.append(text_of(rollout))
    return "\n".join(lines)
