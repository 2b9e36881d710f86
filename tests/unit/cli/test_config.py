import json
import shlex
from pathlib import Path

import yaml

from rlctl.preflight.load import load
from tests.unit.cli.conftest import Rlctl, write_run


def test_show_is_yaml_with_every_value(rlctl: Rlctl) -> None:
    done = rlctl(
        "config", "show", "grpo.recipe.yaml", "rewards=[exact, {name: regex, pattern: '(a): b'}]", "run.seed=4"
    )
    config = yaml.safe_load(done.out)
    assert done.code == 0
    assert config["run"]["seed"] == 4
    assert config["rewards"][1] == {
        "name": "regex",
        "weight": 1.0,
        "correct_at": None,
        "pattern": "(a): b",
        "timeout_s": 5.0,
        "concurrency": 64,
    }
    assert config["trainer"]["optimizer"]["betas"] == [0.9, 0.99]
    sections = ["run", "model", "data", "grpo", "async", "trainer", "generation", "refit", "validation", "checkpoint"]
    sections += ["placement", "health", "environment", "sandbox", "rollout", "agent", "lora"]
    sections += ["reference", "teacher", "teachers", "teacher_key", "roles", "critic"]
    assert set(config) == {"kind", "rewards", "telemetry", *sections}


def test_show_origin_names_the_line_or_the_override_behind_every_value(rlctl: Rlctl) -> None:
    lines = rlctl("config", "show", "grpo.recipe.yaml", "run.seed=4", "--origin").out.splitlines()
    assert next(line for line in lines if "seed:" in line).endswith("# override 1: run.seed=4")
    assert next(line for line in lines if "max_new_tokens:" in line).endswith("# grpo.recipe.yaml:11")
    assert next(line for line in lines if "- name:" in line).endswith("# grpo.recipe.yaml:9")
    values = [line for line in lines if not line.rstrip().endswith(":")]
    assert all("  # " in line for line in values)


def test_check_tells_of_a_first_row_that_the_tokenizer_does_not_know(rlctl: Rlctl, home: Path) -> None:
    (home / "unk.jsonl").write_text('{"prompt": "what is 1 plus 1?", "answer": "2"}\n')
    done = rlctl("config", "check", "grpo.recipe.yaml", "data.train.path=unk.jsonl")
    place = f"{home / 'unk.jsonl'}:1"
    assert done.code == 0
    assert f"11 of 17 tokens of {place} are <unk>, which stands for text that the tokenizer does not know" in done.err
    assert "(it knows ' ' * + - 0 1 2 3 4 5 6 7 8 9 =)" in done.err
    assert "unk" not in rlctl("config", "check", "grpo.recipe.yaml").err


def test_check_tells_of_a_first_rows_message_that_the_template_leaves_out(rlctl: Rlctl, home: Path) -> None:
    (home / "users.jinja").write_text("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}")
    messages = [{"role": "developer", "content": "1+1="}, {"role": "user", "content": "1+2="}]
    (home / "rows.jsonl").write_text(json.dumps({"messages": messages, "answer": "3"}) + "\n")
    overrides = ["data.train.path=rows.jsonl", "data.chat_template=users.jinja"]
    done = rlctl("config", "check", "grpo.recipe.yaml", *overrides)
    note = "1 row has a message of role developer that the chat template leaves out: the model does not see it"
    assert done.code == 0 and note in done.err
    done = rlctl("config", "check", "grpo.recipe.yaml", *overrides, "data.system_prompt=1+1=")
    assert done.code == 2 and "data.system_prompt: the chat template leaves out a system message" in done.err


def test_show_doc_gives_the_meaning(rlctl: Rlctl) -> None:
    assert "# The seed of everything random in the run." in rlctl("config", "show", "grpo.recipe.yaml", "--doc").out


def test_show_of_a_broken_config_shows_it_and_what_is_wrong(rlctl: Rlctl) -> None:
    done = rlctl("config", "show", "grpo.recipe.yaml", "run.seed=x")
    assert done.code == 2
    assert "seed: x" in done.out
    assert "must be a whole number, not 'x'" in done.err


def test_check_says_what_to_run_and_knows_the_kind(rlctl: Rlctl) -> None:
    assert rlctl("config", "check", "sft.recipe.yaml").out == (
        "sft.recipe.yaml: no problems; run it: rlctl train sft sft.recipe.yaml\n"
    )


def test_check_counts_the_problems(rlctl: Rlctl) -> None:
    done = rlctl("config", "check", "grpo.recipe.yaml", "grpo.num_steps=0", "trainer.num_ranks=0")
    assert (done.code, done.out) == (2, "")
    assert [line.rpartition(": ")[2] for line in done.err.splitlines()] == [
        "must be at least 1, not 0",
        "must be at least 1, not 0",
        "2 problems; nothing was started",
    ]


def test_diff_shows_the_values_that_differ_and_no_others(rlctl: Rlctl, home: Path) -> None:
    write_run(home, load("grpo", "grpo.recipe.yaml", ["run.seed=5"]).to_yaml())
    rows = [line.split() for line in rlctl("config", "diff", "grpo.recipe.yaml", "runs/first").out.splitlines()]
    assert rows == [["key", "grpo.recipe.yaml", "runs/first"], ["run.seed", "0", "5"]]
    assert rlctl("config", "diff", "grpo.recipe.yaml", "runs/first", "run.seed=0").out == "no difference\n"
    assert rlctl("config", "diff", "first", "runs/first").out == "no difference\n"
    assert "no such recipe or file; did you mean first?" in rlctl("config", "diff", "firts", "first").err


def test_diff_shows_what_only_one_side_has(rlctl: Rlctl) -> None:
    out = rlctl("config", "diff", "grpo.recipe.yaml", "grpo.recipe.yaml", "rewards=[exact, math_verify]").out
    assert ["rewards.1.name", "–", "math_verify"] in [line.split() for line in out.splitlines()]


def test_commands_that_are_printed_can_be_pasted(rlctl: Rlctl, home: Path) -> None:
    """Quote spaces, brackets and quotes, which a shell reads too."""
    (home / "my recipe.yaml").write_text((home / "grpo.recipe.yaml").read_text())
    (home / "chat.jinja").write_text("{% for message in messages %}{{ message.content }}<eos>{% endfor %}")
    words = ["my recipe.yaml", "rewards=[{name: exact}]", "data.system_prompt=It's short", "run.dir=my runs"]
    words.append("data.chat_template=chat.jinja")
    command = rlctl("config", "check", *words).out.split("run it: ")[1]
    assert shlex.split(command) == ["rlctl", "train", "grpo", *words]
    command = rlctl("train", "grpo", *words, "--dry-run").out.split("run it: ")[1]
    assert shlex.split(command) == ["rlctl", "train", "grpo", "my runs/my recipe.dry-run.yaml"]
    command = rlctl("recipes", "copy", "grpo-tiny", "a copy.yaml").out.split("run it: ")[1]
    assert shlex.split(command)[-1] == "a copy.yaml"
    run = home / "my runs/first"
    run.mkdir()
    (run / "config.yaml").write_text("")
    error = rlctl("train", "grpo", *words, "run.name=first").err
    assert "continue it with --resume 'my runs/first', or choose another name" in error


THEIRS = 'max_steps = 20\n[model]\nname = "model"\n[orchestrator]\nbatch_size = 8\ngroup_size = 4\n'


def test_import_prints_a_draft_and_its_problems(rlctl: Rlctl, home: Path) -> None:
    (home / "rl.toml").write_text(THEIRS)
    done = rlctl("config", "import", "rl.toml")
    assert done.code == 0
    assert yaml.safe_load(done.out)["grpo"] == {
        "num_steps": 20,
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 4,
    }
    assert "prime-rl, grpo: 4 values: 4 translated" in done.err
    assert "draft: rewards: not set, and has no default" in done.err


def test_import_writes_a_recipe_that_check_takes_once_its_questions_are_answered(rlctl: Rlctl, home: Path) -> None:
    (home / "rl.toml").write_text(THEIRS)
    done = rlctl("config", "import", "rl.toml", "-o", "drafted.yaml")
    assert done.code == 0
    assert "drafted.yaml: rewards: not set" in done.err
    answers = ("data.train.path=train.jsonl", "rewards=[exact]", "generation.max_new_tokens=64")
    checked = rlctl("config", "check", "drafted.yaml", *answers, "data.max_prompt_length=64")
    assert checked.code == 0, checked.err


def test_import_overwrites_nothing_and_reads_what_is_there(rlctl: Rlctl, home: Path) -> None:
    (home / "rl.toml").write_text(THEIRS)
    (home / "mine.yaml").write_text("defaults: grpo.yaml\n")
    refused = rlctl("config", "import", "rl.toml", "-o", "mine.yaml")
    assert (refused.code, "mine.yaml: exists; name another file" in refused.err) == (2, True)
    assert (home / "mine.yaml").read_text() == "defaults: grpo.yaml\n"
    refused = rlctl("config", "import", "rl.toml", "-o", "nowhere/mine.yaml")
    assert (refused.code, "nowhere/mine.yaml: cannot be written" in refused.err) == (2, True)
    refused = rlctl("config", "import", "none.toml")
    assert (refused.code, "none.toml: cannot be read: No such file or directory" in refused.err) == (2, True)
