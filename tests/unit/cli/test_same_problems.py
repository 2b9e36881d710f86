"""`rlctl config check` and `rlctl train` report the same problems of recipes, of broken configs and of first rows."""

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest

from rlctl.config.builtin import find_recipe, recipe_names
from rlctl.launch import assembly
from tests.unit.cli.conftest import Rlctl
from tests.unit.data.test_supervised import R1, UNSTABLE

BROKEN = [
    ("grpo", ["trainer.num_ranks=0", "grpo.num_prompts_per_step=7", "grpo.updates_per_step=2"]),
    ("grpo", ["generation.top_p=2", "generation.top_k=3", "async.enabled=maybe", "grpo.loss.name=nothing"]),
    ("grpo", ["environment.nme=x", "grpo.loss.kl_coef=-1", "generation.tensor_parallel_size=3", "run.seed=x"]),
    ("grpo", ["async.enabled=true", "placement.colocated=true", "grpo.loss.importance_cap=null"]),
    ("grpo", ["rewards=[exakt]", "data.train.path=no.jsonl", "trainer.micro_batch_tokens=3"]),
    ("sft", ["validation.recipe=grpo-tiny", "trainer.dtype=floot", "validation.recipe.rewards=[exakt]"]),
    ("sft", ["sft.batch_size=0", "model.max_length=zero", "trainer.num_ranks=9"]),
]
ROWS = [
    ("grpo", '{"prompt": "", "answer": "2"}', []),
    ("grpo", '{"prompt": "1+1=", "answer": null}', []),
    ("sft", '{"messages": [{"role": "user", "content": "hi"}]}', []),
    ("sft", '{"messages": [{"role": "user", "content": null}, {"role": "assistant", "content": "ho"}]}', []),
    ("sft", '{"prompt": "1+1=", "answer": "2"}', ["data.chat_template=r1.jinja"]),
]


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembly, "launch", lambda *_, **options: 0)


# Files of recipes whose thousands of chats take half a minute to tokenize. A dry run here has the first ones.
CHATS = {"sft-games-tiny": "games-sft.jsonl.gz", "sft-code-tiny": "code-sft.jsonl.gz"}
FEW_CHATS = 100


def overrides_of(recipe: str, home: Path) -> list[str]:
    """Return the overrides with which a recipe is planned: a copy of its first rows, where it has very many."""
    overrides = ["run.dir=runs"]
    if recipe in CHATS:
        with gzip.open(find_recipe(recipe).parent / "tiny-data" / CHATS[recipe], "rt") as file:
            (home / "chats.jsonl").write_text("".join(islice(file, FEW_CHATS)))
        overrides.append("data.train.path=chats.jsonl")
    return overrides


def list_errors(rlctl: Rlctl, *words: str) -> list[str]:
    """Return the errors that a command prints."""
    return [line for line in rlctl(*words).err.splitlines() if line.startswith("error: ")]


@pytest.mark.parametrize("recipe", recipe_names())
def test_a_recipe_has_no_problem_for_either(rlctl: Rlctl, home: Path, recipe: str) -> None:
    """Check and plan each recipe. Recipes for GPUs name rows and models of the hub, which this machine may lack."""
    checked = rlctl("config", "check", recipe)
    kind = "sft" if recipe.startswith("sft") else "grpo"
    planned = rlctl("train", kind, recipe, "--dry-run", *overrides_of(recipe, home))
    notes = [line for line in checked.err.splitlines() if "not on this machine" not in line]
    assert (checked.code, notes, planned.code) == (0, [], 0) and "error" not in planned.err


@pytest.mark.parametrize(("kind", "overrides"), BROKEN)
def test_a_broken_config_has_the_same_problems_for_both(rlctl: Rlctl, kind: str, overrides: list[str]) -> None:
    errors = list_errors(rlctl, "config", "check", f"{kind}.recipe.yaml", *overrides)
    assert len(errors) >= 2
    assert list_errors(rlctl, "train", kind, f"{kind}.recipe.yaml", *overrides) == errors


@pytest.mark.parametrize("kind", ["grpo", "sft"])
def test_a_kind_alone_is_the_tiny_recipe_that_train_takes(rlctl: Rlctl, kind: str) -> None:
    done = rlctl("config", "check", kind)
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith(f"no problems; run it: rlctl train {kind} {kind}-tiny\n")
    assert rlctl("config", "show", kind).out == rlctl("config", "show", f"{kind}-tiny").out
    assert rlctl("train", kind).code == 0
    Path(f"{kind}.yaml").write_text("defaults: [nothing]\n")
    assert "nothing" in rlctl("config", "check", kind).err, "a file of that name is meant"


@pytest.mark.parametrize(("kind", "row", "overrides"), ROWS)
def test_a_bad_first_row_is_told_by_both(rlctl: Rlctl, home: Path, kind: str, row: str, overrides: list[str]) -> None:
    (home / "r1.jinja").write_text(R1)
    (home / "rows.jsonl").write_text(f"{row}\n")
    arguments = [f"{kind}.recipe.yaml", "data.train.path=rows.jsonl", *overrides]
    (error,) = list_errors(rlctl, "config", "check", *arguments)
    assert error.startswith(f"error: data: {home / 'rows.jsonl'}:1: ")
    assert list_errors(rlctl, "train", kind, *arguments) == [error]


def test_a_template_that_opens_thinking_refuses_a_bare_answer_before_anything_starts(rlctl: Rlctl, home: Path) -> None:
    (home / "r1.jinja").write_text(R1)
    question = {"role": "user", "content": "hi"}
    rows = []
    for text in ("<think>\nso\n</think>\n\nho", "ho"):
        rows.append({"messages": [question, {"role": "assistant", "content": text}]})
    (home / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["sft.recipe.yaml", "data.train.path=rows.jsonl", "data.chat_template=r1.jinja"]
    (error,) = list_errors(rlctl, "train", "sft", *arguments)
    assert "rows.jsonl:2: the chat template opens the answer of message 2 with <think>, and the message has" in error
    assert list_errors(rlctl, "config", "check", *arguments, "data.train.limit=1") == []
    assert list_errors(rlctl, "train", "sft", *arguments, "data.train.limit=1") == []


def test_a_template_that_rewrites_its_beginning_is_told_by_check_as_by_the_preview(rlctl: Rlctl, home: Path) -> None:
    (home / "unstable.jinja").write_text(UNSTABLE)
    arguments = ["sft.recipe.yaml", "data.chat_template=unstable.jinja"]
    checked = rlctl("config", "check", *arguments)
    assert checked.code == 2
    assert "chats.jsonl:1: the chat template is not prefix-stable at message 2" in checked.err
    previewed = rlctl("data", "preview", *arguments)
    assert previewed.code == 2
    assert "the chat template is not prefix-stable at message 2" in previewed.err
