"""Notes on settings with which the best checkpoints would be deleted silently."""

from pathlib import Path

import pytest

from rlctl.preflight.load import load

VALIDATED = ("data.validation.path=train.jsonl", "validation.every=10", "grpo.num_steps=100", "checkpoint.every=50")


def load_notes(*overrides: str, kind: str = "grpo") -> list[str]:
    return load(kind, f"{kind}.recipe.yaml", list(overrides)).notes


@pytest.mark.parametrize(
    ("kind", "metric", "near"),
    [
        ("grpo", "validation/acuracy", "validation/accuracy"),
        ("grpo", "-validaton/length", "validation/length"),
        ("grpo", "reward/maen", "reward/mean"),
        ("sft", "validation/acuracy", None),  # without validation.recipe
        ("sft", "-validation/los", "validation/loss"),
    ],
)
def test_a_metric_that_is_never_measured(home: Path, kind: str, metric: str, near: str | None) -> None:
    (note,) = load_notes(f"checkpoint.metric={metric}", kind=kind)
    assert note.startswith(f"checkpoint.metric={metric}: no such metric is measured; ")
    assert note.endswith("; no best checkpoint is kept")
    assert (f"; did you mean {near}?" in note) is (near is not None)
    assert load_notes(f"checkpoint.metric={metric}", "checkpoint.keep_best=0", kind=kind) == []


RECOMPUTE = "grpo.loss.proximal=recompute"


@pytest.mark.parametrize(
    ("kind", "metric", "where", "mend"),
    [
        ("grpo", "importance/mean", "with grpo.loss.proximal=recompute", (RECOMPUTE, "grpo.updates_per_step=2")),
        ("grpo", "-importance/masked", f"with {RECOMPUTE} and grpo.loss.importance_mask or sequence_mask",
         (RECOMPUTE, "grpo.loss.importance_mask=[0.5, 2]")),
        ("grpo", "-mismatch/age_1", "with async.enabled=true", ("async.enabled=true",)),
        ("grpo", "-loss/kl", "with grpo.loss.kl_coef above 0", ("grpo.loss.kl_coef=0.1",)),
        ("grpo", "validation/pass_at_k", "with validation.num_generations above 1",
         ("validation.num_generations=4", "validation.temperature=1")),
        ("grpo", "-loss/nll", "in an SFT run", None),
        ("sft", "reward/mean", "in a GRPO run", None),
        ("sft", "validation/accuracy", "where answers are sampled: in a GRPO run, or by validation.recipe", None),
    ],
)  # fmt: skip
def test_a_metric_of_other_runs_has_the_reason(
    home: Path, kind: str, metric: str, where: str, mend: tuple[str, ...] | None
) -> None:
    note = f"checkpoint.metric={metric}: it is measured only {where}; no best checkpoint is kept"
    without_effect = "grpo.loss.kl_coef=0" if kind == "grpo" else "run.seed=1"
    assert load_notes(f"checkpoint.metric={metric}", without_effect, kind=kind) == [note]
    if mend:
        assert [note for note in load_notes(f"checkpoint.metric={metric}", *mend) if "checkpoint.metric" in note] == []


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
    ],
)
def test_a_metric_of_a_step_or_a_validation_is_fine(home: Path, metric: str) -> None:
    assert load_notes(*VALIDATED, f"checkpoint.metric={metric}") == []


def test_ages_and_rewards_are_those_of_the_run(home: Path) -> None:
    run = (*VALIDATED, "async.enabled=true", "async.max_trajectory_age_steps=2")
    assert load_notes(*run, "checkpoint.metric=-age/groups_2") == []
    (note,) = load_notes(*run, "checkpoint.metric=-age/groups_3")
    assert "no such metric is measured; did you mean age/groups_" in note
    (note,) = load_notes(*VALIDATED, "checkpoint.metric=reward/exakt/mean")
    assert "no such metric is measured; did you mean reward/exact/mean?" in note


def test_checkpoints_of_steps_that_are_not_validated(home: Path) -> None:
    assert load_notes(*VALIDATED) == []
    # The checkpoint after 60 steps is at a multiple of 30, and those after 20, 40 and 80 are not.
    uneven = (*VALIDATED, "checkpoint.every=20", "validation.every=30")
    assert load_notes(*uneven) == [
        "checkpoint.every=20 is no multiple of validation.every=30: "
        "3 of 4 checkpoints on the way have no validation/accuracy and can never be the best"
    ]
    for mend in ("checkpoint.keep_best=0", "checkpoint.every=60", "checkpoint.every=0", "checkpoint.metric=reward/mean",
                 "grpo.num_steps=20", "data.validation.path=null"):  # fmt: skip
        assert load_notes(*uneven, mend) == []


@pytest.mark.parametrize("recipe", ["grpo-tiny", "sft-tiny", "grpo-qwen3-0.6b-1gpu", "grpo-qwen3-0.6b-2gpu"])
def test_recipes_keep_their_best(recipe: str) -> None:
    # A model of a hub may be on one machine and not on another.
    assert [note for note in load(None, recipe, []).notes if "not on this machine" not in note] == []
