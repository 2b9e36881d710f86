"""The teacher of a divergence over the vocabulary: its place, its memory in the forecast, and runs that are refused."""

from pathlib import Path
from typing import Any

import pytest

from rlctl.config.errors import ConfigError
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.placement import this_machine
from rlctl.preflight.plan import make_plan
from rlctl.preflight.settled import Settled
from rlctl.preflight.update_memory import divergence_bytes
from tests.unit.preflight.teachers import write_teachers

GIB = 1 << 30
VOCABULARY = "grpo.loss.distillation.over=vocabulary"


TOP = "grpo.loss.distillation={over: top_k, num_top_tokens: 4}"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a home with the teachers `twin` and `wide`, and work in it."""
    home = write_teachers(tmp_path)
    monkeypatch.chdir(home)
    return home


def settle(*overrides: str, device: Any = "cuda", memory: int | None = 80 * GIB, kind: str = "grpo") -> Settled:
    run = load(kind, f"{kind}.recipe.yaml", list(overrides)).settled
    return run.settle_on(RunMachine(device, memory), run.facts)


def forecast_of(settled: Settled) -> dict[str, int]:
    """Return purpose -> bytes of a training rank."""
    plan = make_plan(settled, this_machine(1 if settled.device == "cuda" else 0))
    assert plan.memory
    return plan.memory.trainer


def problems(*overrides: str, kind: str = "grpo") -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(kind, f"{kind}.recipe.yaml", list(overrides))
    return [f"{problem.key}: {problem.what}" for problem in caught.value.problems]


def test_a_resident_is_on_the_device_in_an_update_and_a_swapped_one_leaves_its_states_and_head(home: Path) -> None:
    sizes = read_sizes(home / "twin/config.json")
    plain = forecast_of(settle("teacher.path=twin", "grpo.loss.distillation={}"))
    resident_run = settle("teacher.path=twin", VOCABULARY)
    assert resident_run.placed_roles["teacher"].place == "resident"
    resident = forecast_of(resident_run)
    pack = resident_run.trainer.micro_batch_tokens
    assert resident["teacher's weights"] == 2 * sizes.parameters
    assert resident["teacher's states"] == 2 * sizes.hidden * pack
    assert resident["divergence"] > 0 and "divergence" not in plain
    swapped_run = settle("teacher={path: twin, place: swapped}", VOCABULARY)
    assert swapped_run.placed_roles["teacher"].place == "swapped"
    swapped = forecast_of(swapped_run)
    assert swapped["teacher's weights"] == 2 * sizes.embedding_parameters
    config = swapped_run.grpo
    assert config and config.longest_sequence
    rollouts = config.config.step_shape.prompts * config.config.step_shape.group
    assert swapped["teacher's states"] == 2 * sizes.hidden * rollouts * config.longest_sequence
    top = forecast_of(settle("teacher.path=twin", "grpo.loss.distillation={over: top_k, num_top_tokens: 4}"))
    assert top["teacher's states"] == 12 * 4 * pack


def test_a_resident_is_placed_on_the_device_for_the_update_alone(home: Path) -> None:
    plan = make_plan(settle("teacher.path=wide", VOCABULARY), this_machine(1))
    assert plan.memory
    places = {phase: states["teacher"].place for phase, states in plan.memory.placed_states.items()}
    assert places.pop("train") == "device" and set(places.values()) == {"host"}


def test_auto_is_swapped_where_a_resident_does_not_fit(home: Path) -> None:
    reason = settle("teacher.path=twin", VOCABULARY).placed_roles["teacher"].reason
    assert "its pass precedes each micro-batch's loss" in reason
    tight = settle("teacher.path=twin", VOCABULARY, memory=1 << 20)
    assert tight.placed_roles["teacher"].place == "swapped"
    # Another architecture has no other place.
    assert settle("teacher.path=wide", VOCABULARY, memory=1 << 20).placed_roles["teacher"].place == "resident"


@pytest.mark.parametrize(
    "teachers", ["teacher={path: twin, place: engines}", "teachers={a: {path: wide, place: engines}}"]
)
def test_the_likeliest_tokens_of_engines_are_a_column_and_take_no_weights_of_a_rank(home: Path, teachers: str) -> None:
    key = ("teacher_key=answer",) if teachers.startswith("teachers") else ()
    settled = settle(teachers, *key, TOP, "async.enabled=true")
    assert settled.computed_columns["teacher_top"] == "teacher"
    [role] = settled.placed_roles.values()
    assert role.place == "engines" and role.held is None
    assert settled.grpo and not settled.grpo.streams_training
    assert settled.trainer.teacher and settled.trainer.teacher.is_on_engines
    forecast = divergence_bytes(
        settled.trainer, settled.trainer.teacher, read_sizes(home / "model/config.json"), "cuda"
    )
    assert forecast["teacher's weights"] == 0 and forecast["divergence"] > 0
    assert forecast["teacher's states"] == 12 * 4 * settled.trainer.micro_batch_tokens


def test_nothing_is_computed_before_the_update(home: Path) -> None:
    settled = settle("teacher.path=twin", VOCABULARY)
    assert settled.computed_columns == {} and settled.frozen_roles == ("teacher",)
    assert "log_probs" not in settled.phases


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (
            ["teacher.path=twin", VOCABULARY, "trainer.backend=megatron"],
            "grpo.loss.distillation.over: must be sampled with trainer.backend=megatron, which computes no other "
            "divergence",
        ),
        (
            ["teachers={a: {path: twin}, b: {path: wide}}", "teacher_key=answer", VOCABULARY],
            "grpo.loss.distillation.over: must be sampled with teachers, or top_k with all of them on engines: "
            "vocabulary in the ranks is for one teacher",
        ),
        (
            ["teachers={a: {path: twin, place: engines}, b: {path: wide}}", "teacher_key=answer", TOP],
            "teachers.b.place: must be engines over top_k, as of another teacher",
        ),
        (
            ["teacher={path: twin, place: engines}", VOCABULARY],
            "teacher.place: must be auto, swapped or resident: a divergence needs the teacher's hidden states in the "
            "ranks",
        ),
        (
            ["teacher.path=twin", "grpo.loss.distillation={over: top_k, num_top_tokens: 512}"],
            "grpo.loss.distillation.num_top_tokens: must be below 18, the tokens of the tokenizer, not 512; or "
            "over=vocabulary",
        ),
    ],
)
def test_a_run_that_cannot_compute_the_divergence_is_refused(home: Path, overrides: list[str], problem: str) -> None:
    assert problem in problems(*overrides)


GIVEN = "sft.loss.distillation={}"


def test_given_text_is_distilled_by_a_teacher_in_the_ranks_that_the_forecast_counts(home: Path) -> None:
    sizes = read_sizes(home / "twin/config.json")
    run = settle("teacher.path=twin", GIVEN, kind="sft")
    assert run.config.distillation and run.config.distillation.over == "vocabulary"
    assert run.config.distillation.divergence == "forward_kl"
    assert run.placed_roles["teacher"].place == "resident" and run.frozen_roles == ("teacher",)
    assert forecast_of(run)["teacher's weights"] == 2 * sizes.parameters
    assert "teacher.place" in {choice.key for choice in run.choices}
    swapped_run = settle("teacher={path: twin, place: swapped}", GIVEN, kind="sft")
    swapped = forecast_of(swapped_run)
    longest = swapped_run.max_length
    assert swapped["teacher's states"] == 2 * sizes.hidden * swapped_run.config.step_shape.per_update * longest
    assert settle("teacher.path=wide", GIVEN, kind="sft", memory=1 << 20).placed_roles["teacher"].place == "resident"
    assert settle(kind="sft").placed_roles == {}


def test_the_engines_of_a_validation_fit_beside_the_teacher_of_given_text(home: Path) -> None:
    recipe = ("validation={recipe: grpo.recipe.yaml, every: 1}", "validation.recipe.data.validation.path=train.jsonl")
    run = settle("teacher.path=twin", GIVEN, *recipe, kind="sft")
    assert run.sampling and run.sampling.trainer.teacher == run.trainer.teacher and run.trainer.teacher
    taught = ("validation.recipe.teacher.path=wide", "validation.recipe.grpo.loss.distillation={}")
    measured = settle(*recipe, *taught, kind="sft")
    assert measured.sampling and measured.sampling.placed_roles == measured.placed_roles == {}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ((GIVEN,), "sft.loss.distillation: needs a teacher: set teacher.path, or null"),
        (("teacher.path=twin",), "teacher: nothing reads it: set sft.loss.distillation={}, or null"),
        (
            ("teacher.path=twin", "sft.loss.distillation.over=sampled"),
            "sft.loss.distillation.over: must be vocabulary or top_k, not sampled: the policy did not sample the "
            "tokens of given text",
        ),
        (
            ("teacher={path: twin, place: engines}", GIVEN),
            "teacher.place: must be auto, swapped or resident: a divergence needs the teacher's hidden states in the "
            "ranks",
        ),
        (
            ("teacher.path=twin", GIVEN, "trainer.backend=megatron"),
            "sft.loss.distillation: must be null with trainer.backend=megatron, which computes no divergence from a "
            "teacher",
        ),
        (
            ("teacher={path: wide, place: swapped}", GIVEN),
            "teacher.place: swapped needs the policy's architecture, and HOME/wide has hidden_size 64 -> 128; set "
            "auto or resident",
        ),
        (
            ("sft.loss.nll_coef=0",),
            "sft.loss.nll_coef: must be above 0 without sft.loss.distillation: nothing would be learnt",
        ),
    ],
)
def test_given_text_that_cannot_be_distilled_is_refused(home: Path, overrides: tuple[str, ...], problem: str) -> None:
    assert problem.replace("HOME", str(home)) in problems(*overrides, kind="sft")


def test_keys_of_a_teacher_without_effect_are_noted(home: Path) -> None:
    keys = ("teacher.num_engines=2", "sft.loss.distillation.rest=renormalized", "sft.loss.distillation.beta=0.1")
    run = load("sft", "sft.recipe.yaml", ["teacher.path=twin", *keys])
    reasons = [line.partition(": no effect while ")[2] for line in run.notes]
    assert "teacher.place is auto" in reasons
    assert "sft.loss.distillation.over is vocabulary" in reasons
    assert "sft.loss.distillation.divergence is forward_kl" in reasons
