"""One settled value of a run: each field is a value or its problem, by the kind of run and by its loss."""

from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest

from rlctl.config.errors import BROKEN, BrokenValueError, ConfigError
from rlctl.config.plugins import LOSSES
from rlctl.grpo.losses.base import make_loss
from rlctl.preflight.derived import NotKnownError, derived
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.settled import Settled


@pytest.mark.parametrize(
    ("settings", "cores", "threads"),
    [
        ((), 8, 8),
        (("trainer.num_ranks=3",), 8, 2),
        (("async.enabled=true",), 2, 1),
        (("async.enabled=true", "generation.num_engines=2", "trainer.num_ranks=2"), 8, 3),
        (("async.enabled=true", "generation.num_engines=4"), 2, 1),
        (("async.enabled=true", "trainer.threads=5"), 2, 5),
    ],
)
def test_a_rank_gets_its_share_of_the_cores_that_engines_beside_it_leave(
    settings: tuple[str, ...], cores: int, threads: int
) -> None:
    run = load("grpo", None, list(settings)).settled
    ranks = run.config.trainer.num_ranks
    engines = run.config.generation.num_engines
    assert run.trainer_threads(cores, ranks, engines) == threads


@pytest.mark.parametrize("name", [*LOSSES, "mine.py:Mine"])
def test_a_config_knows_if_its_loss_needs_whole_rollouts(name: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rlctl.grpo.losses.gspo import GspoLoss\n\n\nclass Mine(GspoLoss):\n    pass\n"
    )
    name = name.replace("mine.py", f"{tmp_path}/mine.py")
    overrides = [f"grpo.loss.name={name}"]
    if name.endswith("Mine"):
        settings = ("level=token", "clip_low=0.1", "clip_high=0.1", "dual_clip=null")
        overrides += [f"grpo.loss.{setting}" for setting in settings]
    variants = [overrides]
    has_mask = name not in ("cispo", "dppo")
    if has_mask:
        variants.append([*overrides, "async.enabled=true", "grpo.loss.sequence_mask=[0.5, 2]"])
    if name == "grpo":
        variants.append([*overrides, "grpo.loss.reduction=sequence"])
    answers = set()
    for variant in variants:
        run = load("grpo", None, variant).settled
        needs_whole_rollouts = make_loss(run).needs.whole_rollouts
        assert run.whole_rollouts is needs_whole_rollouts
        answers.add(needs_whole_rollouts)
    assert True in answers or not has_mask


def test_sft_has_no_engines_beside_it() -> None:
    assert load("sft", None, []).settled.trainer_threads(4, ranks=1, engines=0) == 4


def fields_without_value(run: Settled) -> set[str]:
    """Return the names of the fields that are a problem."""
    fields = set()
    for kind in type(run).__mro__:
        fields |= {name for name, attribute in vars(kind).items() if isinstance(attribute, derived)}
    without_value = set()
    for name in fields:
        try:
            getattr(run, name)
        except (BrokenValueError, NotKnownError):
            without_value.add(name.removeprefix("_"))
    return without_value


LOSS = {"proximal", "on_policy_ratio", "computed_columns", "frozen_roles", "whole_rollouts", "phases", "clips"}
CHOSEN = {"chosen_values", "trainer", "generation", "choices"}


@pytest.mark.parametrize(
    ("section", "dependent"),
    [
        ("checkpoint", {"export_dtype"}),
        ("refit", {"checksum"}),
        ("placement", {"is_colocated", "shares_devices", "phases", "placed_roles", *CHOSEN}),
        ("trainer", {"dtype", "generation_dtype", "export_dtype", "placed_roles", *CHOSEN}),
        ("validation", {"validates"}),
        # A reward may be a model, which is a role.
        ("rewards", {"learns_from_rewards", "frozen_roles", "placed_roles", "phases", "choices"}),
    ],
)
def test_a_broken_section_is_the_problem_of_the_fields_that_need_it_and_of_no_other(
    section: str, dependent: set[str]
) -> None:
    run = load("grpo", None, []).settled.settle_on(RunMachine("cpu"), None)
    assert fields_without_value(run) == {"max_length"}
    run = run.settle_on(RunMachine("cpu"), load("grpo", None, []).settled.facts)
    assert fields_without_value(run) == set()
    assert fields_without_value(replace(run, config=replace(run.config, **{section: BROKEN}))) == dependent
    loss = replace(run.config, grpo=replace(run.config.grpo, loss=BROKEN))
    assert fields_without_value(replace(run, config=loss)) == {"placed_roles", "choices", *LOSS}


def test_without_a_device_the_values_of_the_config_alone_are_known() -> None:
    grpo = load("grpo", None, []).settled
    sft = load("sft", None, []).settled
    dtypes = {"dtype", "generation_dtype", "export_dtype"}
    assert fields_without_value(grpo) == {"device", "checksum", "placed_roles", *dtypes, *CHOSEN}
    assert fields_without_value(sft) == {"device", "dtype", "chosen_values", "trainer", "choices", "placed_roles"}
    stated = load("grpo", None, ["trainer.dtype=float32"]).settled
    assert (stated.generation_dtype, stated.export_dtype) == ("float32", "float32")


def test_a_run_is_settled_once_and_cannot_be_changed() -> None:
    run = load("grpo", None, []).settled.settle_on(RunMachine("cpu"), None)
    assert run.trainer is run.trainer
    with pytest.raises(FrozenInstanceError):
        run.machine = RunMachine("cuda")  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError):
        run.trainer.compile = True  # type: ignore[misc]
    for name in ("proximal", "trainer"):
        with pytest.raises(AttributeError):
            setattr(run, name, "rollout")


def test_a_kind_has_none_in_place_of_the_parts_of_the_other() -> None:
    grpo = load("grpo", None, []).settled
    sft = load("sft", None, []).settled
    assert (grpo.grpo, grpo.sampling, grpo.sft) == (grpo, grpo, None)
    assert (sft.grpo, sft.sampling, sft.sft) == (None, None, sft)
    recipe = load("sft", None, ["validation.recipe=grpo-tiny"]).settled.sampling
    assert recipe and recipe.run and recipe.run.config.kind == "sft"


@pytest.mark.parametrize("name", LOSSES)
def test_the_section_of_a_loss_declares_what_its_class_declares(name: str) -> None:
    run = load("grpo", None, [f"grpo.loss.name={name}"]).settled
    loss_class = type(make_loss(run))
    section = run.config.grpo.loss
    for declaration in ("recomputes", "clips", "columns"):
        assert getattr(loss_class, declaration) == getattr(section, declaration), declaration


def test_a_users_loss_has_the_declarations_of_the_loss_that_it_inherits_from(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rlctl.grpo.losses.grpo import GrpoLoss\nfrom rlctl.grpo.losses.gspo import GspoLoss\n\n\n"
        "class Mine(GspoLoss):\n    pass\n\n\nclass Plain(GrpoLoss):\n    pass\n"
    )
    bounds = ["grpo.loss.clip_low=0.1", "grpo.loss.clip_high=0.1", "grpo.loss.dual_clip=null"]
    from_gspo = [f"grpo.loss.name={tmp_path}/mine.py:Mine", "grpo.loss.level=token", *bounds]
    from_grpo = [f"grpo.loss.name={tmp_path}/mine.py:Plain", "grpo.loss.reduction=token", *bounds]
    assert load("grpo", None, from_gspo).settled.proximal == "recompute"
    assert load("grpo", None, from_grpo).settled.proximal == "rollout"
    old = ["async.enabled=true", "async.max_trajectory_age_steps=2", "grpo.loss.proximal=rollout"]
    with pytest.raises(ConfigError, match="rollout clips around policies up to 2 steps old"):
        load("grpo", None, [*from_grpo, *old])
