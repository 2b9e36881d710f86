"""View of groups of rollouts: in columns on a terminal, one below the other and unwrapped in a pipe.

Sampled text has a bar at its left, so it can be told from other text without colours.
"""

import re
from collections.abc import Iterator
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.rule import Rule
from rich.table import Column
from rich.text import Text

from rlctl.dashboard.console import make_table
from rlctl.dashboard.event_text import one_line
from rlctl.dashboard.formats import NONE, count, duration
from rlctl.dashboard.rollout_query import mean_reward
from rlctl.telemetry.exact_tokens import KeyUse, TokenRow, key_use, unpack
from rlctl.telemetry.jsonl import Record
from rlctl.utils.safe_text import neutral

BAR = "┃ "
# Least width in cells of a rollout's column.
LEAST_WIDTH = 38
SIGNS = {True: ("✔", "green"), False: ("✘", "red"), None: ("?", "yellow")}
FOUND = "black on yellow"

Pattern = re.Pattern[str] | None


def render_group(group: Record, console: Console, pattern: Pattern = None, tokens: bool = False) -> RenderableType:
    """Return a group in the console's width. pattern: mark its matches. tokens: add the exact tokens."""
    width = console.width
    rollouts = group["rollouts"]
    columns = max(1, min(len(rollouts), width // LEAST_WIDTH))
    room = (width - 2 * (columns - 1)) // columns
    grid = make_table(*(Column(width=room, no_wrap=True) for _ in range(columns)))
    cells = [_cell(rollout, room, console, pattern) for rollout in rollouts]
    for start in range(0, len(cells), columns):
        grid.add_row(*cells[start : start + columns])
        grid.add_row()
    parts: list[RenderableType] = [Rule(Text(title_of(group), style="bold"), align="left", style="bright_black")]
    if summary := about(group):
        parts.append(Text(summary, style="bright_black"))
    if prompt := str(group.get("prompt", "")):
        parts += [_mark_matches(line, "", pattern, "  ") for line in _wrap_text(prompt, width - 2, console)]
    if len(parts) > 1:
        parts.append(Text())
    parts.append(grid)
    exact_tokens: list[RenderableType] = []
    if tokens:
        for line in token_lines(group):
            exact_tokens += _wrap_text(line, width, console)
    if exact_tokens:
        parts += [*exact_tokens, Text()]
    return Group(*parts)


def plain(group: Record, tokens: bool = False) -> Iterator[str]:
    """Yield a group as lines for a pipe. tokens: add the exact tokens."""
    yield "== " + " · ".join(filter(None, (title_of(group), about(group))))
    if prompt := str(group.get("prompt", "")):
        yield from (f"   {line}" for line in neutral(prompt).split("\n"))
    for rollout in group["rollouts"]:
        sign, _ = SIGNS.get(rollout.get("right"), SIGNS[None])
        yield f"-- #{rollout.get('index')} {sign} " + " · ".join([*_worth(rollout), *_facts(rollout)])
        for text, sampled in pieces(rollout):
            yield from (f"{BAR if sampled else '  '} {line}" for line in neutral(text).split("\n"))
        for name, reason in reasons_of(rollout):
            yield f"   {name}: {reason}"
    yield from token_lines(group) if tokens else ()
    yield ""


def token_lines(group: Record) -> Iterator[str]:
    """Yield lines with the exact tokens of each rollout, one line for each span of given or sampled tokens.

    Given tokens are listed as ids, sampled tokens as id:log-prob.
    """
    try:
        rollouts = unpack(group)
    except ValueError as error:
        yield f"-- tokens cannot be read: {one_line(error)}"
        return
    if rollouts is None:
        yield "-- no tokens were recorded (telemetry.record_tokens; runs of earlier versions have none)"
    use = key_use(group)
    if use == "reused":
        yield "-- keys of a prompt may be of older weights (generation.reset_prefix_cache_after_weight_updates=false)"
    for record, rows in zip(group["rollouts"], rollouts or ()):
        for number, row in enumerate(rows, 1):
            position = f", row {number} of {len(rows)}" if len(rows) > 1 else ""
            num_sampled = int(row.sampled.sum())
            counts = f"{len(row.tokens) - num_sampled} given, {num_sampled} sampled"
            yield f"-- tokens of #{record.get('index')}{position}: {counts}"
            yield from _row_lines(row, use)


def _row_lines(row: TokenRow, use: KeyUse | None) -> Iterator[str]:
    """Yield one line for each span of a token row.

    If a span's tokens attended to keys of other weights, a line before the span says so.
    """
    older_keys = {older.readers.start: older.keys for older in row.older_keys()}
    for span in row.spans():
        ids = row.tokens[span]
        if not row.sampled[span.start]:
            yield "   " + " ".join(map(str, ids))
            continue
        version = row.versions[span.start]
        if span.start in older_keys and use == "recomputed":
            yield f"-- weights changed within the turn: v{version} computed all keys before this token again"
        elif span.start in older_keys and use is not None:
            keys = ", ".join(
                f"v{key_version} of tokens {positions.start + 1} to {positions.stop}"
                for positions, key_version in older_keys[span.start]
            )
            yield f"-- weights changed within the turn: v{version} read keys by {keys}"
        pairs = " ".join(f"{token}:{log_prob:.4g}" for token, log_prob in zip(ids, row.log_probs[span]))
        yield f"{BAR} v{version} {pairs}"


def footer(num_found: int, num_listed: int, recorded: tuple[int, int]) -> Text:
    """Return the lines below the groups: numbers of groups, and the options that show other groups."""
    steps = f"steps {recorded[0]} to {recorded[1]}" if recorded[0] < recorded[1] else f"step {recorded[0]}"
    counts = f"{num_listed} of {count(num_found, 'group')} · recorded: {steps} · {BAR}sampled by the policy"
    return Text(f"{counts}\nothers: --step N, --validation, --worst, --best, --group ID, --grep TEXT", "bright_black")


def headline(rollout: Record) -> list[tuple[str, str]]:
    """Return (text, style) parts of a rollout's title: its number, a sign for right or wrong, reward and advantage."""
    sign, style = SIGNS.get(rollout.get("right"), SIGNS[None])
    return [(f"#{rollout.get('index')} ", "bold"), (f"{sign} ", style), (" · ".join(_worth(rollout)), "bold")]


def facts(rollout: Record) -> str:
    """Return single rewards, length, finish reason and weight versions of a rollout as one line."""
    return " · ".join(_facts(rollout))


def reasons_of(rollout: Record) -> Iterator[tuple[str, str]]:
    """Yield (reward, reason as one line) for each judge that gave a reason."""
    reasons = rollout.get("reasons")
    for name, reason in reasons.items() if isinstance(reasons, dict) else ():
        yield one_line(name), one_line(reason)


def title_of(group: Record) -> str:
    """Return step, task and outcome of a group as one line."""
    origin = ""
    if group.get("step") is not None:
        origin = f"step {group['step']}"
        if group.get("purpose") == "validation":
            origin = f"validation of {origin}"
    outcome = one_line(group.get("outcome") or "")
    return " · ".join(part for part in (origin, one_line(group.get("task", "")), outcome) if part)


def pieces(rollout: Record) -> list[tuple[str, bool]]:
    """Return the text after the prompt as (piece, is sampled) pairs.

    A failed episode has no tokens, so its pieces are its messages.
    """
    if text := rollout.get("text", ()):
        return [(str(part), bool(sampled)) for part, sampled in text]
    messages = (rollout.get("episode") or {}).get("messages", ())
    return [(str(message.get("content", "")), message.get("role") == "assistant") for message in messages]


def about(group: Record) -> str:
    """Return the reference answer of a group as one line.

    For several rollouts the line also has the number of right ones and the mean reward.
    """
    rollouts = group["rollouts"]
    parts = [f"answer {one_line(group['answer'])}"] if group.get("answer") is not None else []
    if len(rollouts) > 1:
        num_right = sum(rollout.get("right") is True for rollout in rollouts)
        parts += [f"{num_right} of {len(rollouts)} right", f"mean reward {_short_number(mean_reward(group))}"]
    return " · ".join(parts)


def _cell(rollout: Record, width: int, console: Console, pattern: Pattern) -> Text:
    """Return a rollout as lines of at most `width` cells."""
    lines = [Text.assemble(*headline(rollout))]
    lines += [Text(line.plain, "bright_black") for line in _wrap_text(facts(rollout), width, console)]
    for text, sampled in pieces(rollout):
        style = "" if sampled else "bright_black"
        margin = BAR if sampled else "  "
        lines += [_mark_matches(line, style, pattern, margin) for line in _wrap_text(text, width - 2, console)]
    for name, reason in reasons_of(rollout):
        lines += [Text(line.plain, "bright_black") for line in _wrap_text(f"{name}: {reason}", width, console)]
    return Text("\n").join(lines)


def _wrap_text(text: str, width: int, console: Console) -> list[Text]:
    # Tabs become blanks, and control characters visible characters, before lines are wrapped.
    return list(Text(neutral(text).expandtabs(4)).wrap(console, max(1, width)))


def _mark_matches(line: Text, style: str, pattern: Pattern, margin: str) -> Text:
    """Style a line in place, mark the pattern's matches in it, and return the line behind a margin."""
    line.stylize(style)
    if pattern:
        for match in pattern.finditer(line.plain):
            line.stylize(FOUND, match.start(), match.end())
    return Text.assemble((margin, "green" if margin == BAR else ""), line)


def _short_number(number: float | None) -> str:
    """Return a reward or an advantage as text, for example 1  0.25  -0.667."""
    return f"{number:.3g}" if isinstance(number, (int, float)) else NONE


def _worth(rollout: Record) -> list[str]:
    """Return texts on a rollout's reward and advantage, with the range of advantages if they differ by token."""
    advantage = rollout.get("advantage")
    advantage_range = rollout.get("advantages")
    parts = [f"reward {_short_number(rollout.get('reward'))}"]
    if advantage is not None:
        sign = "+" if advantage > 0 else ""
        parts.append(f"advantage {sign}{_short_number(advantage)}")
    if advantage_range:
        lowest, highest = advantage_range
        parts[-1] += f" ({_short_number(lowest)} to {_short_number(highest)})"
    return parts


def _facts(rollout: Record) -> list[str]:
    """Return the texts that `facts` joins."""
    rewards: dict[str, Any] = rollout.get("rewards") or {}
    versions: dict[str, int] = rollout.get("versions") or {}
    finish = {"stop": "ended", "length": "cut at the limit"}.get(str(rollout.get("finish")), rollout.get("finish"))
    parts = []
    if len(rewards) > 1:
        parts += [f"{one_line(name)} {_short_number(reward)}" for name, reward in rewards.items()]
    parts.append(count(rollout.get("tokens", 0), "token"))
    if episode := rollout.get("episode"):
        parts += _course(episode)
    else:
        parts.append(str(finish))
    if len(versions) > 1:
        parts.append(" ".join(f"v{version} x{tokens}" for version, tokens in versions.items()))
    else:
        parts += [f"v{version}" for version in versions]
    if rollout.get("failed"):
        parts.append(f"failed: {one_line(rollout['failed'])}")
    return [part for part in parts if part]


def _course(episode: dict[str, Any]) -> list[str]:
    """Return texts on an episode's turns and ending, its tool calls, and the environment's time."""
    parts = [f"{count(episode.get('turns', 0), 'turn')}: {episode.get('ending')}"]
    if calls := episode.get("tool_calls"):
        errors = f", {episode['tool_errors']} failed" if episode.get("tool_errors") else ""
        errors += f" ({episode['malformed_calls']} malformed)" if episode.get("malformed_calls") else ""
        parts.append(f"{count(calls, 'tool call')}{errors}")
    if spelled := episode.get("spelled"):
        parts.append(f"{count(spelled, 'control token')} read as text")
    if unwritten := episode.get("unwritten"):
        parts.append(f"{count(unwritten, 'message')} left out by the chat template")
    if "environment_s" in episode:
        parts.append(f"environment {duration(episode['environment_s'])}")
    return parts
