"""Answers to commands that do not exist: they name the command that the user may have meant.

The answer comes from the table `WORDS`, from the commands of other groups, or from a similar name. `WORDS` has words
that users of TRL, verl, NeMo-RL, prime-rl and vLLM type. `rlctl/config/unknown_keys.py` does the same for config keys.
"""

from difflib import get_close_matches
from itertools import chain
from typing import Any

import typer
from typer.core import TyperGroup

from rlctl.config.builtin import algorithm_names, recipe_names
from rlctl.config.errors import ConfigError, Problem

# Base class of errors for wrong options and arguments: click's UsageError, or Typer's own in some versions of Typer.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]
# A wrong option is answered with a similar option if `difflib`'s ratio of the two names is at least this, 0 to 1.
_NEAR_OPTION = 0.7
_TRAIN = "rlctl train grpo RECIPE"
_ONE_COMMAND = f"{_TRAIN} starts trainer, engines and environments"
_PREFERENCES = f"pairs of answers train nothing here: rlctl train sft RECIPE, or {_TRAIN}"
_WEIGHTS = "a checkpoint is whole already: rlctl export RUN FOLDER copies it for transformers and vLLM"
_SERVE = "vllm serve RUN/checkpoints/step_N/hf serves a checkpoint, and rlctl chat RUN talks to it"
_EVALUATE = "rlctl eval RUN measures it"
# Word of another tool -> answer. Words that are commands of some group of rlctl are found without this table.
WORDS = {
    # TRL
    "dpo": _PREFERENCES,
    "kto": _PREFERENCES,
    "reward": f"a reward is a function: {_TRAIN} 'rewards=[{{name: my.py:function}}]'",
    "vllm-serve": _ONE_COMMAND,
    # verl, NeMo-RL
    "ppo": f"PPO is grpo with grpo.advantage.name=gae and a critic: {_TRAIN}",
    "rl": f"type {_TRAIN}",
    "merge": _WEIGHTS,
    "convert": _WEIGHTS,
    # prime-rl
    "trainer": _ONE_COMMAND,
    "orchestrator": _ONE_COMMAND,
    "env-server": f"{_ONE_COMMAND}; rlctl env check tries one",
    "inference": _SERVE,
    # vLLM
    "serve": _SERVE,
    "generate": "rlctl chat RUN answers in the terminal, and each line of a pipe",
    "complete": "rlctl chat RUN answers in the terminal, and each line of a pipe",
    "run-batch": "rlctl eval RUN answers held-out tasks",
    "collect-env": "rlctl doctor tells about this machine",
    # everywhere
    "evaluate": _EVALUATE,
    "evals": _EVALUATE,
    "validate": _EVALUATE,
    "resume": "rlctl train KIND --resume RUN goes on",
    "run": f"did you mean runs? Or type {_TRAIN}",
    "launch": f"type {_TRAIN}",
    "start": f"type {_TRAIN}; rlctl cluster up starts a cluster",
    "finetune": "type rlctl train sft RECIPE",
    "init": "rlctl recipes copy grpo-tiny mine.yaml makes a recipe yours",
    "push": "rlctl export RUN FOLDER --push OWNER/NAME uploads a model",
    "ps": "rlctl runs list shows the runs",
    "dashboard": "rlctl runs dash RUN shows a run",
    "tokenize": "rlctl data preview RECIPE shows how rows become tokens",
    "help": "rlctl --help shows the commands",
}
# Word of other command lines -> command of a group of rlctl.
SAME = {
    "ls": "list",
    "ps": "list",
    "view": "show",
    "watch": "dash",
    "tail": "logs",
    "kill": "stop",
    "cp": "copy",
    "compare": "diff",
}


class Commands(TyperGroup):
    """A group of commands. It answers an unknown command, option or value with one line."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Read the group's own options. Raises ConfigError for a wrong one."""
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            raise _as_config_error(error) from error

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command. Raises ConfigError for a wrong option or argument."""
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            raise _as_config_error(error) from error

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> Any:  # type: ignore[override]
        """Return the command that `args` begin with. Raises ConfigError if there is none."""
        word = args[0]
        if not ctx.resilient_parsing and not word.startswith("-") and word not in self.commands:
            path = f"rlctl {ctx.info_name}" if ctx.parent else "rlctl"
            remark = _command_remark(path, word, list(self.list_commands(ctx)), self._grouped_commands())
            raise ConfigError([Problem("", "", f"{path} has no `{word}`; {remark}")])
        return super().resolve_command(ctx, args)

    def _grouped_commands(self) -> dict[str, str]:
        """Return the commands of this group's subgroups: "GROUP COMMAND" -> "COMMAND"."""
        grouped = dict[str, str]()
        for name, group in self.commands.items():
            if isinstance(group, TyperGroup):
                grouped |= {f"{name} {command}": command for command in group.commands}
        return grouped


def _as_config_error(error: Any) -> Exception:
    """Return a ConfigError with one line for a wrong option or argument.

    The error by which a command without arguments shows its help is returned unchanged.
    """
    if type(error).__name__ == "NoArgsIsHelpError":
        return error  # type: ignore[no-any-return]
    command_names: list[str] = []
    context = error.ctx
    # The outermost context is left out: its name is that of the program, for example a path.
    while context and context.parent:
        command_names.insert(0, context.info_name)
        context = context.parent
    see_help = f"; see {' '.join(['rlctl', *command_names, '--help'])}"
    # Only the error for an unknown option has this attribute.
    if getattr(error, "possibilities", None) is not None:
        option = error.option_name
        parameters = error.ctx.command.params
        option_names = chain.from_iterable(parameter.opts for parameter in parameters)
        near = get_close_matches(option, [name for name in option_names if name[:2] == "--"], n=1, cutoff=_NEAR_OPTION)
        remark = ""
        if near:
            remark = f"; did you mean {near[0]}?"
        # A command with one of these arguments takes keys of the config.
        elif any(parameter.name in ("arguments", "overrides") for parameter in parameters):
            remark = _key_remark(option, error.ctx.info_name)
        return ConfigError([Problem(option, "", f"no such option{remark or see_help}")])
    text = error.format_message().rstrip(".").replace("Value error, ", "")
    return ConfigError([Problem("", "", f"{text[:1].lower()}{text[1:]}{see_help}")])


def _key_remark(option: str, command: str | None) -> str:
    """Return a remark on an unknown option that is a key of the config, for example --run.seed; else return ""."""
    from rlctl.config.convert import known_keys
    from rlctl.config.fields import schema_keys
    from rlctl.config.schema import KINDS

    name = option.lstrip("-").replace("-", "_")
    schema = KINDS.get(command or "", KINDS["grpo"])
    keys = [key for key, _ in schema_keys(schema)]
    if name in keys:
        return f"; a key has no dashes: {name}=VALUE"
    schema_names = known_keys(schema)
    if schema_names.has_remark(name):
        return f"; a key has no dashes{schema_names.remark(name, [])}"
    similar = [key for key in keys if key.rpartition(".")[2] in (f"num_{name}", f"max_{name}")]
    return f"; a key has no dashes: {' or '.join(similar)}" if similar else ""


def _command_remark(path: str, word: str, commands: list[str], grouped: dict[str, str]) -> str:
    """Return the answer to an unknown `word` after the group `path`, for example "rlctl runs".

    commands: the group's own commands. grouped: the commands of its subgroups, "GROUP COMMAND" -> "COMMAND".
    """
    if word in WORDS and path in ("rlctl", "rlctl train"):
        return WORDS[word]
    synonym = SAME.get(word)
    if synonym in commands:
        return f"did you mean {synonym}?"
    if owners := [f"rlctl {full_name}" for full_name, command in grouped.items() if command == word]:
        return f"did you mean {' or '.join(owners)}?"
    if remark := _training_remark(word):
        return remark
    candidates = commands + list(grouped.values())
    if path == "rlctl":
        candidates += WORDS
    near_words = get_close_matches(word, candidates, n=1)
    if not near_words:
        return f"{path} has {', '.join(commands)}"
    near = near_words[0]
    for full_name, command in grouped.items():
        if command == near:
            return f"did you mean rlctl {full_name}?"
    return f"did you mean {near}?" if near in commands else WORDS[near]


def _training_remark(word: str) -> str:
    """Return the `rlctl train` command for a word that names an algorithm, a recipe or a file; else return ""."""
    if word in algorithm_names():
        return f"rlctl train grpo {word}-tiny tries it; `defaults: [my.yaml, algorithms/{word}]` is it over a recipe"
    if word in recipe_names():
        return f"did you mean rlctl train {'sft' if word.startswith('sft-') else 'grpo'} {word}?"
    if word.endswith((".yaml", ".yml", ".toml")):
        return f"name the kind of run first: rlctl train grpo {word}, or rlctl train sft {word}"
    return ""
