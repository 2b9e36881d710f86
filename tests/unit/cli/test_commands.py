"""An unknown command is answered with one line and the words to type."""

import pytest

from rlctl.cli.commands import SAME, WORDS
from tests.unit.cli.conftest import Rlctl


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        # TRL, verl, NeMo-RL, prime-rl, vLLM.
        ("grpo my.yaml", "rlctl has no `grpo`; did you mean rlctl train grpo or rlctl bench grpo?"),
        ("sft", "rlctl has no `sft`; did you mean rlctl train sft or rlctl bench sft?"),
        ("dpo", "pairs of answers train nothing here: rlctl train sft RECIPE, or rlctl train grpo RECIPE"),
        ("vllm-serve --model x", "rlctl train grpo RECIPE starts trainer, engines and environments"),
        ("ppo", "PPO is grpo with grpo.advantage.name=gae and a critic: rlctl train grpo RECIPE"),
        ("rloo", "rlctl train grpo rloo-tiny tries it; `defaults: [my.yaml, algorithms/rloo]` is it over a recipe"),
        ("merge", "a checkpoint is whole already: rlctl export RUN FOLDER copies it for transformers and vLLM"),
        ("rl @ rl.toml", "type rlctl train grpo RECIPE"),
        ("orchestrator", "rlctl train grpo RECIPE starts trainer, engines and environments"),
        ("serve", "vllm serve RUN/checkpoints/step_N/hf serves a checkpoint, and rlctl chat RUN talks to it"),
        ("generate", "rlctl chat RUN answers in the terminal, and each line of a pipe"),
        ("evaluate", "rlctl eval RUN measures it"),
        # The same within a group, and slips.
        ("train ppo", "PPO is grpo with grpo.advantage.name=gae and a critic: rlctl train grpo RECIPE"),
        ("train my.yaml", "name the kind of run first: rlctl train grpo my.yaml, or rlctl train sft my.yaml"),
        ("sft-tiny", "did you mean rlctl train sft sft-tiny?"),
        ("runs ls", "did you mean list?"),
        ("dash", "did you mean rlctl runs dash?"),
        ("config chek", "did you mean check?"),
        ("resum", "rlctl train KIND --resume RUN goes on"),
        ("run list", "did you mean runs? Or type rlctl train grpo RECIPE"),
        ("config compare a b", "rlctl config has no `compare`; did you mean diff?"),
        ("config complet", "rlctl config has show, check, diff, import, reference"),
        ("env xyz", "rlctl env has no `xyz`; rlctl env has check, tasks"),
    ],
)
def test_a_word_of_another_tool_or_a_slip_is_answered_in_one_line(rlctl: Rlctl, typed: str, answer: str) -> None:
    done = rlctl(*typed.split())
    assert done.code == 2
    line, count = done.err.splitlines()
    assert line.startswith("error: rlctl ") and line.endswith(answer)
    assert count == "1 problem; nothing was started"


@pytest.mark.parametrize(
    ("typed", "answer"),
    [
        ("train grpo my.yaml --dryrun", "--dryrun: no such option; did you mean --dry-run?"),
        ("--verson", "--verson: no such option; did you mean --version?"),
        ("runs --dir x list", "--dir: no such option"),
        (
            "train grpo --grpo.num_steps=1",
            "--grpo.num_steps: no such option; a key has no dashes: grpo.num_steps=VALUE",
        ),
        ("train grpo x --steps 1", "--steps: no such option; a key has no dashes: grpo.num_steps"),
        ("config check x --lr 1", "--lr: no such option; a key has no dashes; it belongs at trainer.optimizer.lr"),
        ("train sft --xyz", "--xyz: no such option; see rlctl train sft --help"),
        (
            "chat x --temperature inf",
            "invalid value for '--temperature': must be a finite number, not inf; see rlctl chat",
        ),
        ("env check x --timeout nan", "invalid value for '--timeout': "),
        (
            "bench generation --pause inf",
            "invalid value for '--pause': must be a finite number, not inf; see rlctl bench",
        ),
        ("model check", "missing argument 'FOLDER | NAME | RUN'; see rlctl model check --help"),
        ("export a b c", "got unexpected extra argument(s) (c); see rlctl export --help"),
        (
            "export a b --dtype bf16",
            "invalid value for '--dtype': 'bf16' is not one of 'float32', 'bfloat16'",
        ),
    ],
)
def test_a_wrong_option_or_argument_is_answered_in_one_line(rlctl: Rlctl, typed: str, answer: str) -> None:
    done = rlctl(*typed.split())
    line, count = done.err.splitlines()
    assert (done.code, done.out, count) == (2, "", "1 problem; nothing was started")
    assert line.startswith(f"error: {answer}")


def test_a_group_without_a_command_shows_its_help(rlctl: Rlctl) -> None:
    assert "Check that a model trains exactly." in rlctl("model").out


def test_no_word_of_the_table_is_a_command_and_each_answer_names_commands_that_are(rlctl: Rlctl) -> None:
    help_lines = rlctl("--help").out.splitlines()
    commands = {line.split()[1] for line in help_lines if line.startswith("│ ") and line[2] != " "}
    assert not (commands & WORDS.keys()) and not SAME.keys() & set(SAME.values())
    for answer in WORDS.values():
        words = answer.replace("'", " ").split()
        named_commands = {words[index + 1] for index, word in enumerate(words) if word == "rlctl"}
        assert named_commands <= {*commands, "--help"}, answer
