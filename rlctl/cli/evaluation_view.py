"""Tables of `rlctl eval`: the figures of one data set, and the comparison of two results."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.table import Column
from rich.text import Text

from rlctl.dashboard.console import figures, make_table, names, texts
from rlctl.dashboard.formats import count, number, percent


def result_table(result: Mapping[str, Any]) -> Group:
    """Return the figures of one data set, with intervals at 95%."""
    title = f"{count(result['figures']['tasks'], 'task')}, {_sampling(result)}"
    table = make_table(*_columns(), rows=_result_rows(result))
    return Group(Text.assemble((f"{result['target']} on {result['data']}", "bold"), f": {title}"), table, "")


def comparison_table(result: Mapping[str, Any]) -> Group:
    """Return the difference of two results, and whether it is more than chance."""
    table = make_table(*_columns())
    for label, show in (("accuracy", _points), ("reward", _signed)):
        found = result[label]
        table.add_row(label, show(found["mean"]), _range(found, show))
        verdict = "more than chance" if found["more_than_chance"] else "no more than chance"
        table.add_row("", "", f"p = {found['p_value']:.2g} ({found['test']}): {verdict}")
    better = result["accuracy"]
    table.add_row("tasks", f"{result['tasks']}", f"{better['better']} better, {better['worse']} worse, rest equal")
    if result["left_out"]:
        table.add_row("left out", f"{result['left_out']}", "without a score in both")
    title = Text.assemble((f"{result['second']} minus {result['first']}", "bold"), f" on {result['data']}")
    return Group(title, *_settings(result), table, "")


def _columns() -> tuple[Column, ...]:
    return names(style="bright_black"), figures(), texts()


def _settings(result: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the settings of both sides of a comparison: in one line where they are equal."""
    first, second = (result["settings"][side] for side in ("first", "second"))
    if not result["unequal"]:
        yield Text(f"both: {_side(result, first)}", "bright_black")
        return
    yield Text(f"B, {result['second']}: {_side(result, second)}", "bright_black")
    yield Text(f"A, {result['first']}: {_side(result, first)}", "bright_black")
    differ = ", ".join(result["unequal"])
    yield Text(f"Settings differ ({differ}): the difference is that of models and settings together.", "yellow")


def _sampling(settings: Mapping[str, Any]) -> str:
    """Return how answers were sampled: `4 answers each, temperature 1, top_p 0.9`."""
    temperature = settings["temperature"]
    parts = [f"{count(settings['generations'], 'answer')} each"]
    parts.append(f"temperature {temperature:g}" if temperature else "greedy")
    if temperature and settings.get("top_p", 1) < 1:
        parts.append(f"top_p {settings['top_p']:g}")
    if temperature and settings.get("top_k", 0) > 0:
        parts.append(f"top_k {settings['top_k']}")
    return ", ".join(parts)


def _side(result: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """Return the settings of one side of a comparison; its rewards too if the other has different ones."""
    parts = [_sampling(settings), f"at most {count(settings['max_new_tokens'], 'token')}"]
    if "scored_by" in result["unequal"]:
        parts.append(f"scored by {' + '.join(settings['scored_by'])}")
    return ", ".join(parts)


def _result_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield (label, value, interval or detail)."""
    figures, k = result["figures"], result["generations"]
    if "accuracy" in figures:
        yield (f"accuracy (avg@{k})" if k > 1 else "accuracy"), *_interval(figures["accuracy"], percent)
        for size, estimate in figures["pass_at"].items() if k > 1 else ():
            yield f"pass@{size}", *_interval(estimate, percent)
        yield "reward", *_interval(figures["reward"], number)
        for name, found in figures["rewards"].items() if len(figures["rewards"]) > 1 else ():
            value, interval = _interval(found, number) if "value" in found else (number(None), "")
            yield f"  {name}", value, interval
    length = figures["length"]
    most = f"median {number(length['median'])}, p90 {number(length['p90'])}, at most {length['max']} tokens"
    yield "length", number(length["mean"]), most
    yield "truncated", percent(figures["truncated"]), f"at generation.max_new_tokens={result['max_new_tokens']}"
    for cause, times in figures["failures"].items():
        yield "failed", str(times), f"{cause}; left out, no reward of 0"
    if figures["unscored_tasks"]:
        yield "no score", str(figures["unscored_tasks"]), "tasks left out, for all of their rewards failed"
    if "missing" in result:
        yield "missing", "", result["missing"]
    if "path" in result:
        yield "kept in", "", result["path"]


def _interval(estimate: Mapping[str, Any], show: Callable[[float], str]) -> tuple[str, str]:
    return show(estimate["value"]), _range(estimate, show)


def _range(found: Mapping[str, Any], show: Callable[[float], str]) -> str:
    """Return the interval at 95%, or why there is none."""
    if found["low"] is None:
        return str(found["note"])
    return f"95%: {show(found['low']).removesuffix(' points')} to {show(found['high'])}"


def _points(value: float) -> str:
    return f"{100 * value:+.1f} points"


def _signed(value: float) -> str:
    return f"{value:+.3f}"
