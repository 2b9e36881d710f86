"""Groups of rollouts and configs in the forms that trackers take."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlctl.telemetry.jsonl import Record

# Columns of a table with a row a rollout.
COLUMNS = ("step", "task", "rollout", "prompt", "answer", "text", "reward", "advantage", "finish", "tokens")


def rows(step: int, groups: Sequence[Record]) -> list[list[Any]]:
    """Return a row of `COLUMNS` for each rollout."""
    return [
        [
            *(step, group["task"], one.get("index"), group.get("prompt"), group.get("answer"), text_of(one)),
            *(one.get(key) for key in ("reward", "advantage", "finish", "tokens")),
        ]
        for group in groups
        for one in group["rollouts"]
    ]


def as_text(groups: Sequence[Record]) -> str:
    """Return groups as a person reads them: the prompt, then each rollout below its reward and advantage."""
    return "\n\n".join("\n".join(_lines(group)) for group in groups)


def text_of(rollout: Record) -> str:
    """Return the text after the prompt; text that the policy did not sample is in brackets ⟦ ⟧."""
    return "".join(text if sampled else f"⟦{text}⟧" for text, sampled in rollout.get("text", ()))


def flat(config: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of a config; the entry of a list has its number."""
    for name, value in config.items():
        children = dict(enumerate(value)) if isinstance(value, list) else value
        full = f"{key}.{name}" if key else str(name)
        if isinstance(children, dict) and children:
            yield from flat(children, full)
        else:
            yield full, value


def _lines(group: Record) -> Iterator[str]:
    outcome = f", {group['outcome']}" if group.get("outcome") else ""
    yield f"=== {group['task']}{outcome}, answer {group.get('answer')}"
    yield str(group.get("prompt", ""))
    for one in group["rollouts"]:
        worth = ", ".join(f"{key} {one[key]:.3g}" for key in ("reward", "advantage") if one.get(key) is not None)
        yield f"--- {one.get('index')}: {worth or 'no reward'}, {one.get('tokens')} tokens, {one.get('finish')}"
        yield text_of(one)
