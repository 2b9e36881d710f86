"""`rlctl eval`: measures a model on held-out tasks, scores stored answers again, or compares two results."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from rlctl.cli.arguments import WEIGHTS, Arguments, AsJson, OfStep, split
from rlctl.cli.output import busy, console, examples, explain_engine_errors, say, tell
from rlctl.config.builtin import runs_folder
from rlctl.config.errors import ConfigError, Problem

EPILOG = examples(
    "rlctl eval sums                            a run's newest checkpoint",
    "rlctl eval sums --step 40 --data hard.jsonl --data easy.jsonl",
    "rlctl eval Qwen/Qwen3-0.6B my.yaml -k 8    any model by a recipe; pass@8",
    "rlctl eval --compare runs/sums/checkpoints/step_20 sums    more than chance?",
    "rlctl eval --rescore sums 'rewards=[{name: mine.py:strict}]'",
)
_SAVE_EVERY = 256


def evaluate(
    target: Annotated[str | None, WEIGHTS] = None,
    arguments: Arguments = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="PATH", help="Rows instead of data.validation.path. Repeatable."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            "--samples", "-k", help="Answers to each task, at generation.temperature: pass@1 to pass@k.", min=1
        ),
    ] = None,
    step: OfStep = None,
    to: Annotated[
        Path | None,
        typer.Option(help="The folder of results; if left out, RUN/evals, or evals here.", show_default=False),
    ] = None,
    save_every: Annotated[int, typer.Option(help="Save the answers after so many tasks.", min=1)] = _SAVE_EVERY,
    rescore: Annotated[
        Path | None,
        typer.Option(metavar="ROLLOUTS", help="Score stored answers again: of an eval, a run, a rollouts.jsonl."),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(metavar="A B", help="Compare two results, or checkpoints by theirs: is B better than A?"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a model on held-out tasks, as its run's validation does. Killed, the same command goes on."""
    with explain_engine_errors("interrupted; the same command goes on from what was saved"):
        if compare is not None:
            if target or arguments or data or rescore:
                raise ConfigError([Problem("--compare", "", "takes two results and nothing else")])
            results = _compare(*compare)
        elif rescore is not None:
            # With --rescore the first argument is a recipe or an override, not a model.
            recipe_and_overrides = [target] if target else []
            recipe_and_overrides += arguments or []
            results = _rescore(rescore, recipe_and_overrides, step, to)
        elif target is None:
            raise ConfigError([Problem("CHECKPOINT | FOLDER | RUN", "", "is missing; rlctl runs list shows the runs")])
        else:
            from rlctl.evaluation.evaluation_configs import make_evaluation

            recipe, overrides = split(arguments)
            evaluation = make_evaluation(
                target,
                tell,
                recipe=recipe,
                overrides=overrides,
                data=data or [],
                samples=samples,
                step=step,
                to=to,
            )
            with _show_progress() as progress:
                results = evaluation.run(save_every, progress)
    if as_json:
        typer.echo(json.dumps(results if compare is None else results[0], indent=1))
        return
    from rlctl.cli.evaluation_view import comparison_table, result_table

    for result in results:
        console().print(comparison_table(result) if compare is not None else result_table(result), soft_wrap=False)


def _rescore(source: Path, arguments: list[str], step: int | None, to: Path | None) -> list[dict[str, Any]]:
    from rlctl.evaluation.evaluation_configs import load_measured
    from rlctl.evaluation.rescore import find_answers, rescore

    recipe, overrides = split(arguments)
    answers = find_answers(source, runs_folder(), step)
    remedy = f"rlctl eval --rescore {source} RECIPE"
    added_overrides = ["telemetry.trackers=[]", "run.name=null"]
    composed = load_measured(
        recipe or str(answers.config),
        command_overrides=added_overrides,
        overrides=overrides,
        is_own=recipe is None,
        remedy=remedy,
    )
    with busy("scoring"):
        return [rescore(answers, composed, to, tell)]


def _compare(first: Path, second: Path) -> list[dict[str, Any]]:
    from rlctl.evaluation.comparison import compare, pair, results_of

    first_result, second_result = pair(results_of(first, runs_folder()), results_of(second, runs_folder()))
    return [compare(first_result, second_result)]


@contextmanager
def _show_progress() -> Iterator[Any]:
    """Yield a function that shows the number of finished tasks on stderr.

    On a terminal it changes one line. Elsewhere it prints a line each time answers are saved.
    """
    out = console(stderr=True)
    if not out.is_terminal:
        yield lambda name, done, count: say(f"{name}: {done} of {count} tasks", err=True)
        return
    with out.status("starting the engine") as status:
        yield lambda name, done, count: status.update(f"{name}: {done} of {count} tasks")
