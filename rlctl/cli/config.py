"""`rlctl config`: shows, checks and compares configs, drafts one from another tool's, and prints all keys."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from rlctl.cli.arguments import Arguments, note_repeats, split_any
from rlctl.cli.completion import complete_config
from rlctl.cli.output import ShownProgress, console, examples, note, say
from rlctl.config.errors import ConfigError

app = typer.Typer(help="Show, check and compare the configs of runs.", no_args_is_help=True)

DEFAULT = "grpo-tiny"


@app.command(
    epilog=examples(
        "rlctl config show", "rlctl config show my.yaml run.seed=1 --origin", "rlctl config show sft-tiny --doc"
    )
)
def show(
    arguments: Arguments = None,
    origin: Annotated[bool, typer.Option("--origin", help="Add where each value was written.")] = False,
    doc: Annotated[bool, typer.Option("--doc", help="Add what each key means.")] = False,
) -> None:
    """Print the whole config as it would run, defaults included, as YAML."""
    from rlctl.cli.config_view import lines, print_lines
    from rlctl.preflight.load import draft

    recipe, overrides = split_any(arguments, DEFAULT)
    root, problems = draft(None, recipe, overrides)
    lines_with_remarks = []
    for text, where, meaning in lines(root):
        remarks = [where] if origin and where else []
        if doc and meaning:
            remarks.append(meaning)
        lines_with_remarks.append((text, "; ".join(remarks)))
    print_lines(lines_with_remarks, console())
    if problems:
        raise ConfigError(problems)


@app.command(
    epilog=examples(
        "rlctl config check my.yaml",
        "rlctl config check my.yaml --try-rewards",
        "rlctl config check code-tiny --all-rows",
        "rlctl config check my.yaml grpo.num_prompts_per_step=96",
    )
)
def check(
    arguments: Arguments = None,
    rewards: Annotated[
        bool, typer.Option("--try-rewards", help="Call each reward on the first row, in a process of its own.")
    ] = False,
    all_rows: Annotated[
        bool, typer.Option("--all-rows", help="Score the answer of every row, as if the policy had given it.")
    ] = False,
    environments: Annotated[
        bool,
        typer.Option("--try-environments", help="Begin an episode on the first row, in a process of its own."),
    ] = False,
) -> None:
    """Report everything that is wrong with a config, at once, and start nothing.

    Only the first row of the data is read. `rlctl train KIND --dry-run` reads all rows, calls your rewards, and
    begins an episode; `rlctl data preview` tokenizes all rows.
    """
    from rlctl.config.provenance import show_path
    from rlctl.launch.prepare import RunRequest, prepare

    recipe, overrides = split_any(arguments, DEFAULT)
    prepared = prepare(RunRequest(kind=None, recipe=recipe, overrides=overrides), "checked", ShownProgress())
    prepared.try_first_rows()
    prepared.try_users_code(rewards=rewards, environments=environments)
    if all_rows:
        prepared.try_all_rows()
    note(prepared.notes)
    composed = prepared.composed
    command = shlex.join(["rlctl", "train", composed.config.kind, recipe, *overrides])
    say(f"{show_path(composed.recipe)}: no problems; run it: {command}")


@app.command(
    epilog=examples("rlctl config diff grpo-tiny my.yaml", "rlctl config diff runs/first runs/second run.seed=2")
)
def diff(
    a: Annotated[str, typer.Argument(help="A recipe or a run.", show_default=False, autocompletion=complete_config)],
    b: Annotated[str, typer.Argument(help="Another one.", show_default=False, autocompletion=complete_config)],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Overrides of the second.", show_default=False)
    ] = None,
) -> None:
    """List the values in which two configs differ."""
    from rlctl.cli.config_view import difference
    from rlctl.config.builtin import find_recipe
    from rlctl.config.compose import compose

    root_a = compose(find_recipe(a), [])
    root_b = compose(find_recipe(b), note_repeats(overrides))
    table = difference(a, root_a, b, root_b)
    if table is None:
        typer.echo("no difference")
    else:
        console().print(table, soft_wrap=False)


@app.command(
    "import",
    epilog=examples("rlctl config import grpo_math.yaml", "rlctl config import ppo_trainer.yaml -o mine.yaml"),
)
def import_(
    file: Annotated[
        Path, typer.Argument(help="A config of verl, NeMo-RL or prime-rl, YAML or TOML.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the draft to this file; if left out, print it.")
    ] = None,
) -> None:
    """Draft a recipe from another tool's config, with a comment on each line that has no counterpart.

    The draft is checked, and its problems are printed.
    """
    from rlctl.config.import_peer import draft_recipe, write_draft
    from rlctl.preflight.load import problems_of_file, problems_of_text

    draft = draft_recipe(file)
    if output is None:
        typer.echo(draft.text, nl=False)
        note([draft.summary()])
        problems = problems_of_text(draft.text)
    else:
        write_draft(draft, output)
        say(f"{output}: {draft.summary()}")
        problems = problems_of_file(output)
    note(f"to be mended: {problem}" for problem in problems)
    if output is not None:
        say(f"check it: rlctl config check {shlex.quote(str(output))}")


@app.command(
    epilog=examples(
        "rlctl config reference > configs/README.md", "rlctl config reference --peers > configs/COMING_FROM.md"
    )
)
def reference(
    peers: Annotated[
        bool, typer.Option("--peers", help="Print the keys of TRL, verl, NeMo-RL and prime-rl with rlctl's instead.")
    ] = False,
) -> None:
    """Print every key with its type, default, meaning and limits, as Markdown."""
    from rlctl.config.coming_from import coming_from_page
    from rlctl.config.key_reference import reference as reference_page

    typer.echo(coming_from_page() if peers else reference_page(), nl=False)
