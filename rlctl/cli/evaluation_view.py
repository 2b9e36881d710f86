"""Tables of `rlctl eval`: the figures of one data set, and the comparison of two results."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group
from rich.table import Column
from rich.text import Text

from rlctl.dashboard.console import figures, make_table, names, texts
from rlctl.dashboard.formats import count, number, percent


def result_table(result: Mapping[str, Any]) -> Group:
    """Return a table of a result's figures on one data set, with 95% confidence intervals."""
    title = f"{count(result['figures']['tasks'], 'task')}, {_describe_sampling(result)}"
    table = make_table(*_columns(), rows=_result_rows(result))
    return Group(Text.assemble((f"{result['target']} on {result['data']}", "bold"), f": {title}"), table, "")


def comparison_table(result: Mapping[str, Any]) -> Group:
    """Return a table of the differences of two results, with a verdict if each is more than chance."""
    table = make_table(*_columns())
    for label, format_difference in (("accuracy", _points_text), ("reward", _signed_text)):
        difference = result[label]
        table.add_row(label, format_difference(difference["mean"]), _interval_text(difference, format_difference))
        verdict = "more than chance" if difference["more_than_chance"] else "no more than chance"
        table.add_row("", "", f"p = {difference['p_value']:.2g} ({difference['test']}): {verdict}")
    accuracy = result["accuracy"]
    table.add_row("tasks", f"{result['tasks']}", f"{accuracy['better']} better, {accuracy['worse']} worse, rest equal")
    if result["left_out"]:
        table.add_row("left out", f"{result['left_out']}", "without a score in both")
    title = Text.assemble((f"{result['second']} minus {result['first']}", "bold"), f" on {result['data']}")
    return Group(title, *_settings_lines(result), table, "")


def _columns() -> tuple[Column, ...]:
    return names(style="bright_black"), figures(), texts()


def _settings_lines(result: Mapping[str, Any]) -> Iterator[Text]:
    """Yield lines with the sampling settings of both results: one line if they are equal, else one line each."""
    first = _describe_side(result, "first")
    if not result["unequal"]:
        yield Text(f"both: {first}", "bright_black")
        return
    yield Text(f"B, {result['second']}: {_describe_side(result, 'second')}", "bright_black")
    yield Text(f"A, {result['first']}: {first}", "bright_black")
    unequal = ", ".join(result["unequal"])
    yield Text(f"Settings differ ({unequal}): the difference is that of models and settings together.", "yellow")


def _describe_sampling(settings: Mapping[str, Any]) -> str:
    """Return a text on how answers were sampled, for example "4 answers each, temperature 1, top_p 0.9"."""
    temperature = settings["temperature"]
    parts = [f"{count(settings['generations'], 'answer')} each"]
    parts.append(f"temperature {temperature:g}" if temperature else "greedy")
    if temperature and settings.get("top_p", 1) < 1:
        parts.append(f"top_p {settings['top_p']:g}")
    if temperature and settings.get("top_k", 0) > 0:
        parts.append(f"top_k {settings['top_k']}")
    return ", ".join(parts)


def _describe_side(result: Mapping[str, Any], side: str) -> str:
    """Return the settings of one side of a comparison. Add its rewards if the other side has different rewards."""
    settings = result["settings"][side]
    parts = [_describe_sampling(settings), f"at most {count(settings['max_new_tokens'], 'token')}"]
    if "scored_by" in result["unequal"]:
        parts.append(f"scored by {' + '.join(settings['scored_by'])}")
    return ", ".join(parts)


def _result_rows(result: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a result's table: (label, value, interval or detail)."""
    figures = result["figures"]
    num_answers = result["generations"]
    if "accuracy" in figures:
        label = f"accuracy (avg@{num_answers})" if num_answers > 1 else "accuracy"
        yield _estimate_row(label, figures["accuracy"], percent)
        if num_answers > 1:
            for size, estimate in figures["pass_at"].items():
                yield _estimate_row(f"pass@{size}", estimate, percent)
        yield _estimate_row("reward", figures["reward"], number)
        if len(figures["rewards"]) > 1:
            for name, estimate in figures["rewards"].items():
                yield _estimate_row(f"  {name}", estimate, number)
    length = figures["length"]
    quantiles = f"median {number(length['median'])}, p90 {number(length['p90'])}, at most {length['max']} tokens"
    yield "length", number(length["mean"]), quantiles
    yield "truncated", percent(figures["truncated"]), f"at generation.max_new_tokens={result['max_new_tokens']}"
    for cause, times in figures["failures"].items():
        yield "failed", str(times), f"{cause}; left out, no reward of 0"
    if figures["unscored_tasks"]:
        yield "no score", str(figures["unscored_tasks"]), "tasks left out, for all of their rewards failed"
    if "missing" in result:
        yield "missing", "", result["missing"]
    if "path" in result:
        yield "kept in", "", result["path"]


def _estimate_row(
    label: str, estimate: Mapping[str, Any], format_number: Callable[[float], str]
) -> tuple[str, str, str]:
    if "value" not in estimate:
        return label, number(None), ""
    return label, format_number(estimate["value"]), _interval_text(estimate, format_number)


def _interval_text(estimate: Mapping[str, Any], format_number: Callable[[float], str]) -> str:
    """Return the 95% confidence interval as text, or the reason why there is none."""
    if estimate["low"] is None:
        return str(estimate["note"])
    low = format_number(estimate["low"]).removesuffix(" points")
    return f"95%: {low} to {format_number(estimate['high'])}"


def _points_text(difference: float) -> str:
    return f"{100 * difference:+.1f} points"


def _signed_text(difference: float) -> str:
    return f"{difference:+.3f}"
