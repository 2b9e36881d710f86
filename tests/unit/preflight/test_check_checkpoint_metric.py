"""Notes where the best checkpoints would be lost without a word."""

from pathlib import Path

import pytest

from rlctl.preflight.load import load

VALIDATED = ("data.validation.path=train.jsonl", "validation.every=10", "grpo.num_steps=100", "checkpoint.every=50")


def notes(*overrides: str, kind: str = "grpo") -> list[str]:
    return load(kind, f"{kind}.recipe.yaml", list(overrides)).notes


@pytest.mark.parametrize(
    ("kind", "metric", "near"),
    [
        ("grpo", "validation/acuracy", "validation/accuracy"),
        ("grpo", "-validaton/length", "validation/length"),
        ("grpo", "validation/pass_at_k", None),
        ("grpo", "reward/maen", "reward/mean"),
        ("sft", "validation/accuracy", None),  # without validation.recipe
        ("sft", "-validation/los", "validation/loss"),
    ],
)
def test_a_metric_that_is_never_measured(home: Path, kind: str, metric: str, near: str | None) -> None:
    (note,) = notes(f"checkpoint.metric={metric}", kind=kind)
    assert note.startswith(f"checkpoint.metric={metric}: no such metric is measured; ")
    assert note.endswith("; no best checkpoint is kept")
    if near:
        assert f"; did you mean {near}?" in note
    assert notes(f"checkpoint.metric={metric}", "checkpoint.keep_best=0", kind=kind) == []


@pytest.mark.parametrize(
    "metric",
    [
        "validation/length",
        "-time/step",
        "time/validation",
        "reward/mean",
        "reward/exact/mean",
        "validation/reward",
        "-validation/failed_rewards",
        "age/groups_2",
        "-mismatch/age_1",
    ],
)
def test_a_metric_of_a_step_or_a_validation_is_fine(home: Path, metric: str) -> None:
    assert notes(*VALIDATED, f"checkpoint.metric={metric}") == []


def test_pass_at_k_is_measured_with_several_answers_a_prompt(home: Path) -> None:
    assert (
        notes("checkpoint.metric=validation/pass_at_k", "validation.num_generations=4", "validation.temperature=1")
        == []
    )


def test_checkpoints_of_steps_that_are_not_validated(home: Path) -> None:
    assert notes(*VALIDATED) == []
    # After 20, 40, 60 and 80; of these 20, 40 and 80 are no multiples of 30, and the last step always is validated.
    uneven = (*VALIDATED, "checkpoint.every=20", "validation.every=30")
    assert notes(*uneven) == [
        "checkpoint.every=20 is no multiple of validation.every=30: "
        "3 of 4 checkpoints on the way have no validation/accuracy and can never be the best"
    ]
    for mend in ("checkpoint.keep_best=0", "checkpoint.every=60", "checkpoint.every=0", "checkpoint.metric=reward/mean",
                 "grpo.num_steps=20", "data.validation.path=null"):  # fmt: skip
        assert notes(*uneven, mend) == []


@pytest.mark.parametrize("recipe", ["grpo-tiny", "sft-tiny", "grpo-qwen3-0.6b-1gpu", "grpo-qwen3-0.6b-2gpu"])
def test_recipes_keep_their_best(recipe: str) -> None:
    # Models of a hub are on one machine and not on another.
    assert [note for note in load(None, recipe, []).notes if "not on this machine" not in note] == []
