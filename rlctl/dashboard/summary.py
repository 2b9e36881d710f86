"""Summary of a run: results, times and memory, and the commands to type next."""

import sys
from collections.abc import Callable, Iterator
from contextlib import suppress

from rich.console import Console, Group
from rich.text import Text

from rlctl.dashboard.balance_hint import hint
from rlctl.dashboard.console import make_table, names, texts
from rlctl.dashboard.event_text import ENDS, one_line
from rlctl.dashboard.formats import duration, error_factor, gib, number, percent, span
from rlctl.dashboard.panels.speed import process_kinds, scoring_kinds
from rlctl.dashboard.state import RunState, best_checkpoint
from rlctl.grpo import metric_rows
from rlctl.grpo.critic_rows import EXPLAINED_VARIANCE
from rlctl.grpo.losses.sections import STEP_MISMATCH
from rlctl.rewards.judge import metric_rows as judge_rows
from rlctl.run.health import ANSWERS, SKIPPED_UPDATES, UNSCORED_ANSWERS
from rlctl.sft.metric_rows import HELD_OUT_LOSS, NLL
from rlctl.telemetry.clock import STEP_SECONDS
from rlctl.telemetry.throughput import MFU, split
from rlctl.training.metric_rows import TEACHER_IN_UPDATE

# Least mean share of groups with equal rewards that the summary mentions.
_MOSTLY = 0.9


def print_summary(state: RunState, console: Console) -> None:
    """Print the summary table and the commands to type next. Long commands are not wrapped."""
    console.print(summary_table(state))
    print_next_steps(state, console)


def say_goodbye(state: RunState, console: Console, failure: Exception | None = None) -> None:
    """Print the failure of a view, if any, and the summary.

    Never raises, so that no run fails because its summary cannot be printed.
    """
    try:
        if failure is not None:
            console.print(Text(f"the view stopped early: {failure!r}", style="yellow"))
        print_summary(state, console)
    except SystemExit:
        pass  # rich raises this at a broken pipe, for example of `| head -2`
    except Exception as error:
        with suppress(OSError):
            print(f"the summary could not be printed: {error!r}", file=sys.stderr)


def summary_table(state: RunState) -> Group:
    """Return one line with the run's status, then the table of results."""
    style = ENDS.get(state.status, "bold red" if state.status == "died" else "cyan")
    reason = one_line(state.end.get("reason") or "")
    title = Text.assemble((f"{state.name} ", "bold"), (state.status, style), f": {reason}" if reason else "")
    return Group(title, make_table(names(style="bright_black"), texts(), rows=facts_of(state)))


def print_next_steps(state: RunState, console: Console) -> None:
    """Print the commands that the run proposes, one on each line."""
    commands = state.end.get("next") or []
    if commands:
        console.print("\n[bold]Next steps[/]")
        for command in commands:
            console.print(Text(f"  {command}"), soft_wrap=True, highlight=False)


def facts_of(state: RunState) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of each known result of the run, and of its times and memory."""
    yield "steps", f"{state.step} of {state.num_steps or '?'} in {span(state.elapsed_s)}"
    for line in state.start.get("damaged") or []:
        yield "damaged", f"{one_line(line)}; resumed after step {state.start.get('start_step', 0)} instead"
    for label, name, show in (
        ("validation accuracy", metric_rows.HELD_OUT_ACCURACY.name, percent),
        ("validation pass@k", metric_rows.PASS_AT_K.name, percent),
        ("validation loss", HELD_OUT_LOSS.name, number),
        ("train accuracy", metric_rows.ACCURACY.name, percent),
        ("reward", metric_rows.REWARD.name, number),
        ("loss", NLL.name, number),
    ):
        if series := state.series(name):
            first_step, first_value = series[0]
            last_step, last_value = series[-1]
            if len(series) > 1:
                yield label, f"{show(first_value)} → {show(last_value)}  (step {first_step} → {last_step})"
            else:
                yield label, f"{show(last_value)}  (step {last_step})"
    if problem := _failed_validation(state):
        yield "last validation", problem
    if skipped := sum(state.values(SKIPPED_UPDATES.name)):
        yield "skipped updates", f"{skipped:,.0f} without an optimizer step ({SKIPPED_UPDATES.name})"
    uniform_share = state.mean(metric_rows.UNIFORM_GROUPS.name)
    explained = state.series(EXPLAINED_VARIANCE.name)
    if explained:
        first_step, first_share = explained[0]
        last_step, last_share = explained[-1]
        yield "critic explains", f"{percent(first_share)} → {percent(last_share)}  (step {first_step} → {last_step})"
    # A critic learns from groups of equal rewards.
    elif uniform_share is not None and uniform_share >= _MOSTLY:
        share = percent(uniform_share)
        yield "little to learn", f"{share} of the groups had equal rewards: rlctl runs rollouts shows them"
    if failed := _failed_rewards(state):
        yield "failed rewards", failed
    if requests := _judge_requests(state):
        yield "judge", requests
    if best := best_checkpoint(state):
        step, value = best
        metric = state.checkpoint_metric.removeprefix("-")
        yield "best checkpoint", f"{state.checkpoints[step].get('path', f'step {step}')}  ({metric} {number(value)})"
    elif state.checkpoints:
        newest = state.checkpoints[max(state.checkpoints)]
        yield "checkpoint", str(newest.get("path", f"step {newest['step']}"))
    yield from _speed(state)
    # If older weights or a cut distribution (top_p, top_k) sampled, a large mismatch is no error.
    is_comparable = not any(state.values(metric_rows.GREATEST_AGE.name)) and not state.cuts_distribution
    if (mismatch := state.values(STEP_MISMATCH.name)) and is_comparable:
        yield "mismatch", f"{error_factor(max(mismatch))} at most (1 is exact)"
    if parity := state.values(metric_rows.PARITY.name):
        yield "parity", f"{error_factor(max(parity))} at most (1 is exact), under equal weights"
    if state.health:
        warnings = []
        for check, steps in state.health.items():
            times = f" {len(steps)} times" if len(steps) > 1 else ""
            listed = list(map(str, sorted(steps)[:3]))
            if len(steps) > 3:
                listed.append("...")
            warnings.append(f"{check.replace('_', ' ')}{times} (step {', '.join(listed)})")
        yield "warnings", " · ".join(warnings)
    used_gib = {kind: state.values(f"memory/{kind}_gib") for kind in process_kinds(state)}
    if used_gib:
        yield "peak memory", " · ".join(f"{kind} {gib(max(values))}" for kind, values in used_gib.items())


def _failed_validation(state: RunState) -> str:
    """Return a text on the answers of the last validation without a score; empty if all had one."""
    last = state.validations.last
    failed = last.get(UNSCORED_ANSWERS.name, 0)
    if not failed:
        return ""
    unknown = "" if metric_rows.HELD_OUT_ACCURACY.name in last else ", so that it has no accuracy"
    answers = last.get(ANSWERS.name, failed)
    return f"step {last['step']}: rewards failed for {failed:,.0f} of {answers:,.0f} answers{unknown}"


def _failed_rewards(state: RunState) -> str:
    """Return a text on the rollouts with failed rewards in training and validation; empty if there were none."""
    failed_by_step = [count for count in state.values(metric_rows.FAILED_REWARDS.name) if count]
    failed_answers = sum(state.values(UNSCORED_ANSWERS.name))
    parts = []
    if failed_by_step:
        greatest_share = max(state.values(metric_rows.FAILED_SHARE.name), default=0.0)
        steps = f"{len(failed_by_step)} of {len(state.steps)} steps"
        parts.append(f"{sum(failed_by_step):,.0f} rollouts in {steps}, at most {percent(greatest_share)} of a step's")
    if failed_answers:
        parts.append(f"{failed_answers:,.0f} validation answers")
    return " · ".join(parts)


def _judge_requests(state: RunState) -> str:
    """Return a text on the requests to judges, their tokens, cost and failures; empty without a judge."""
    sums = {metric.name: sum(state.values(metric.name)) for metric in judge_rows.METRICS}
    if not sums[judge_rows.CALLS.name] + sums[judge_rows.FOUND.name]:
        return ""
    tokens = sums[judge_rows.INPUT_TOKENS.name] + sums[judge_rows.OUTPUT_TOKENS.name]
    parts = [
        f"{sums[judge_rows.CALLS.name]:,.0f} requests",
        f"{sums[judge_rows.FOUND.name]:,.0f} found",
        f"{tokens:,.0f} tokens",
    ]
    if sums[judge_rows.COST.name]:
        parts.append(f"cost {sums[judge_rows.COST.name]:,.4g}")
    if sums[judge_rows.RETRIES.name]:
        parts.append(f"{sums[judge_rows.RETRIES.name]:,.0f} retries")
    if sums[judge_rows.FAILED.name]:
        parts.append(f"{sums[judge_rows.FAILED.name]:,.0f} without a verdict")
    return " · ".join(parts)


def _speed(state: RunState) -> Iterator[tuple[str, str]]:
    """Yield (label, value) of throughput, MFU, step time, idle shares and ages."""
    if rates := _means(state, number, "throughput", ("effective", "training", "generation")):
        yield "throughput", f"{rates} tokens/s/device"
    if (mfu := state.mean(MFU.name)) is not None:
        yield "MFU", percent(mfu)
    if (step := state.mean(STEP_SECONDS.name)) is not None:
        # The sums over all steps take the place of one step's record.
        shares = split([{name: sum(state.values(name)) for name in state.steps.names}])
        phases = " · ".join(f"{name.replace('_', ' ')} {share:.0%}" for name, share in shares[:6] if share >= 0.005)
        yield "step time", f"{duration(step)}: {phases}"
    if teacher := _teacher_seconds(state):
        yield "teacher", teacher
    if idle := _means(state, percent, "idle", ("trainer", "generator", *scoring_kinds(state))):
        yield "idle", idle
    if (age := state.mean(metric_rows.AGE.name)) is not None:
        oldest = max(state.values(metric_rows.GREATEST_AGE.name))
        mixed = state.mean(metric_rows.MIXED_VERSIONS.name)
        yield "age of groups", f"mean {number(age)} · at most {oldest:.0f} steps · mixed versions {percent(mixed)}"
    if advice := hint(state):
        yield "advice", advice


def _teacher_seconds(state: RunState) -> str:
    """Return a text on the seconds of a mean step that a teacher took; empty if none did."""
    step = state.mean(STEP_SECONDS.name)
    places = {"time/teacher": "its passes", "time/idle_teacher": "its engines", TEACHER_IN_UPDATE.name: "in training"}
    parts = []
    for name, place in places.items():
        # Steps without the phase lack the metric.
        seconds = sum(state.values(name)) / max(1, len(state.steps))
        if seconds and step:
            parts.append(f"{place} {duration(seconds)}, {percent(seconds / step)} of a step")
    return " · ".join(parts)


def _means(state: RunState, show: Callable[[float], str], group: str, names: tuple[str, ...]) -> str:
    """Return the mean over steps of each recorded metric `group/name`, as one text."""
    means = {name: state.mean(f"{group}/{name}") for name in names}
    return " · ".join(f"{name} {show(mean)}" for name, mean in means.items() if mean is not None)
