"""Each role gets the place that its model, the backend and the memory allow, with the reason; the rest is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlctl.config.errors import ConfigError
from rlctl.models.facts import ModelSizes
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.load import load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.placement import this_machine
from rlctl.preflight.plan import make_plan
from rlctl.preflight.roles import PlacedRole
from tests.unit.preflight.teachers import write_teachers
from tests.unit.preflight.test_combinations import ADVANTAGE

GIB = 1 << 30
TERM = "grpo.loss.distillation={}"
NOVICE = "roles.novice.path=wide"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a home with the teachers `twin` and `wide`, and work in it."""
    home = write_teachers(tmp_path)
    monkeypatch.chdir(home)
    return home


def place(*overrides: str, device: Any = "cpu", memory: int | None = None, role: str = "teacher") -> PlacedRole:
    settled = load("grpo", "grpo.recipe.yaml", [TERM, *overrides]).settled
    placed: PlacedRole = settled.settle_on(RunMachine(device, memory), settled.facts).placed_roles[role]
    return placed


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load("grpo", "grpo.recipe.yaml", list(overrides))
    return [f"{problem.key}: {problem.what}" for problem in caught.value.problems]


def test_a_place_at_auto_is_the_faster_that_fits_and_the_plan_shows_it(home: Path) -> None:
    assert place("teacher.path=twin").place == "resident"
    assert place("teacher.path=wide").place == "resident"
    roomy = place("teacher.path=twin", device="cuda", memory=GIB)
    assert roomy.place == "resident" and "against" in roomy.reason
    tight = place("teacher.path=twin", device="cuda", memory=1 << 20)
    assert tight.place == "swapped" and "resident does not fit: 0.2 MiB beside" in tight.reason
    run = load("grpo", "grpo.recipe.yaml", [TERM, "teacher.path=twin"]).settled
    plan = make_plan(run.settle_on(RunMachine("cpu"), run.facts), this_machine(0))
    assert [choice.value for choice in plan.chosen if choice.key == "teacher.place"] == ["resident"]
    assert plan.memory and plan.memory.trainer["teacher"] == 4 * read_sizes(home / "model/config.json").parameters


def test_a_resident_that_does_not_fit_is_refused_with_the_arithmetic_and_the_place_where_it_would(home: Path) -> None:
    written = place("teacher.path=twin", "teacher.place=resident", device="cuda", memory=1 << 20)
    assert written.problem and "teacher.place=swapped takes no memory of the device" in written.problem
    other = place("teacher.path=wide", device="cuda", memory=1 << 20)
    assert other.problem and "more trainer.num_ranks hold it" in other.problem
    run = load("grpo", "grpo.recipe.yaml", [TERM, "teacher.path=wide"]).settled
    plan = make_plan(run.settle_on(RunMachine("cuda", 1 << 20), run.facts), this_machine(1))
    assert plan.unplaced == {"teacher": other.problem}


def test_a_resident_is_on_the_device_for_its_passes_alone(home: Path) -> None:
    run = load("grpo", "grpo.recipe.yaml", [TERM, "teacher.path=wide"]).settled
    plan = make_plan(run.settle_on(RunMachine("cuda", GIB), run.facts), this_machine(1))
    assert plan.memory
    places = {phase: states["teacher"].place for phase, states in plan.memory.placed_states.items()}
    assert places.pop("log_probs") == "device" and set(places.values()) == {"host"}


def test_the_policys_first_weights_are_swapped_or_the_base_below_adapters(home: Path) -> None:
    kl = ("grpo.loss.kl_coef=0.1", "teacher.path=twin")
    first = place(*kl, role="reference")
    assert first.place == "swapped" and not first.is_chosen
    assert place(*kl, "lora={}", role="reference").held is None
    assert place(*kl, "reference.path=wide", role="reference").place == "resident"


def test_a_further_role_is_an_entry_of_the_config_and_a_column_of_a_users_class(home: Path) -> None:
    """It costs no file of rlctl. tests/system/test_further_role.py has a whole run."""
    (home / "mine.py").write_text(ADVANTAGE.format(("novice_log_prob", "reference_log_prob")))
    settled = load("grpo", "grpo.recipe.yaml", [NOVICE, "grpo.advantage=mine.py:Mine"]).settled
    settled = settled.settle_on(RunMachine("cpu"), settled.facts)
    assert settled.computed_columns == {"reference_log_prob": "reference", "novice_log_prob": "roles.novice"}
    assert settled.frozen_roles == ("reference", "roles.novice")
    placed = settled.placed_roles["roles.novice"]
    assert placed.place == "resident" and placed.held and placed.held.name == "roles.novice"
    assert [choice.key for choice in settled.choices if choice.key.endswith("place")] == ["roles.novice.place"]


@pytest.mark.parametrize(
    ("columns", "overrides", "problem"),
    [
        (
            ("rollout_log_prob",),
            [NOVICE],
            "roles.novice: nothing reads it: name 'novice_log_prob' in the columns of a loss or an advantage of yours",
        ),
        (
            ("novise_log_prob",),
            [NOVICE],
            "grpo.advantage.name: `columns` names 'novise_log_prob'; did you mean novice_log_prob?: the run has no "
            "roles.novise; set roles.novise.path",
        ),
        (
            ("reference_logprob",),
            [],
            "grpo.advantage.name: `columns` names 'reference_logprob'; did you mean reference_log_prob?; there are "
            "rollout_log_prob, proximal_log_prob, reference_log_prob",
        ),
        (("novice_log_prob",), ["roles.novice={}"], "roles.novice.path: not set; needed: the model"),
        (
            ("age",),
            ["roles.teacher.path=twin"],
            "roles.teacher: must have another name: teacher_log_prob is another column",
        ),
        (
            ("novice_log_prob",),
            ["roles.novice={path: wide, place: swapped}"],
            "roles.novice.place: swapped needs the policy's architecture, and HOME/wide has hidden_size 64 -> 128; set "
            "auto or resident",
        ),
        (
            ("novice_log_prob",),
            ["roles.novice={path: wide, place: engines}"],
            "roles.novice.place: must be auto, swapped or resident: engines do not score with the roles.novice",
        ),
    ],
)
def test_a_further_role_that_cannot_be_is_refused(
    home: Path, columns: tuple[str, ...], overrides: list[str], problem: str
) -> None:
    (home / "mine.py").write_text(ADVANTAGE.format(columns))
    assert problem.replace("HOME", str(home)) in problems("grpo.advantage=mine.py:Mine", *overrides)


def test_a_dry_settling_without_sizes_places_nothing(home: Path) -> None:
    settled = load("grpo", "grpo.recipe.yaml", [TERM, "teacher.path=twin"]).settled
    sizes: ModelSizes | None = None
    assert settled.settle_on(RunMachine("cpu"), sizes).placed_roles == {}


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([TERM], "grpo.loss.distillation: needs a teacher: set teacher.path, or null"),
        (["teacher.path=twin"], "teacher: nothing reads it: set grpo.loss.distillation={}, or null"),
        ([TERM, "teacher={}"], "teacher.path: not set; needed: the teacher's model, or lora, an adapter with its base"),
        (
            [TERM, "teacher.path=twin", "teachers={a: {path: twin}}", "teacher_key=school"],
            "teachers: there is a teacher already: give either teacher or teachers",
        ),
        (
            [TERM, "teachers={a: {path: twin}, b: {path: wide}}"],
            "teacher_key: not set; needed: the column in which rows name one of a, b",
        ),
        ([TERM, "teacher.path=twin", "teacher_key=x"], "teacher_key: needs teachers, one for each value of the column"),
        (
            [TERM, "teacher={path: wide, place: swapped}"],
            "teacher.place: swapped needs the policy's architecture, and HOME/wide has hidden_size 64 -> 128; set "
            "auto or resident",
        ),
        (
            [TERM, "teacher.path=wide", "trainer.backend=megatron"],
            "teacher.path: has hidden_size 64 -> 128, and trainer.backend=megatron holds no other architecture; set "
            "trainer.backend=fsdp",
        ),
        (
            ["rewards=[]"],
            "rewards: is empty: at least one reward, for example `- name: exact`, or grpo.loss.distillation with a "
            "teacher",
        ),
        (
            ["grpo.num_generations_per_prompt=1"],
            "grpo.num_generations_per_prompt: must be at least 2, not 1: a rollout's advantage is its distance from "
            "others of its group",
        ),
        (
            [TERM, "teacher.path=twin", "rewards=[]", "grpo.dynamic_sampling.filter=rewards"],
            "grpo.dynamic_sampling.filter: rewards leaves out every group of a run without rewards: set null",
        ),
    ],
)
def test_a_contradiction_is_refused_in_one_line(home: Path, overrides: list[str], problem: str) -> None:
    assert problem.replace("HOME", str(home)) in problems(*overrides)


def test_another_tokenizer_is_refused_with_the_token(home: Path) -> None:
    file = home / "wide/tokenizer.json"
    raw = json.loads(file.read_text())
    raw["model"]["vocab"]["+"], raw["model"]["vocab"]["-"] = raw["model"]["vocab"]["-"], raw["model"]["vocab"]["+"]
    file.write_text(json.dumps(raw))
    [problem] = problems(TERM, "teacher.path=wide")
    assert problem.startswith("teacher.path: another tokenizer than the policy's: token '")


def test_a_teacher_on_engines_has_devices_of_its_own_or_the_arithmetic_says_why_not(home: Path) -> None:
    engines = ("teacher.path=wide", "teacher.place=engines", "placement.colocated=true")
    roomy = place(*engines, device="cuda", memory=80 * GIB)
    assert roomy.place == "engines" and roomy.held is None and roomy.problem is None
    assert "1 GPUs of its own, each with weights" in roomy.reason and "key-value cache" in roomy.reason
    tight = place(*engines, device="cuda", memory=2 * GIB)
    assert tight.problem and "of 1.8 GiB usable: a larger teacher.tensor_parallel_size takes less" in tight.problem
    run = load("grpo", "grpo.recipe.yaml", [TERM, *engines, "teacher.num_engines=2"]).settled
    on_gpus = run.settle_on(RunMachine("cuda", 80 * GIB), run.facts)
    plan = make_plan(on_gpus, this_machine(4))
    assert plan.placement
    taken = {slot.devices for slot in [*plan.placement.trainers, *plan.placement.engines]}
    scoring = {slot.devices for slot in plan.placement.scoring}
    assert len(scoring) == 2 and not scoring & taken
    assert any("teacher on engines: 2 GPUs of its own" in note for note in plan.notes)
    lacking = make_plan(on_gpus, this_machine(len(taken) + 1))
    assert lacking.misplaced and "2 GPUs needed for engines that score with a model" in lacking.misplaced
    on_cpu = make_plan(run.settle_on(RunMachine("cpu"), run.facts), this_machine(0))
    assert on_cpu.placement and len(on_cpu.placement.scoring) == 2
    # Without GPUs all processes share the machine's memory: the forecast counts both engines.
    assert on_cpu.memory
    sizes = read_sizes(home / "wide/config.json")
    assert on_cpu.memory.trainer["engines of the teacher"] >= 2 * 4 * sizes.parameters
    refused = problems(TERM, "teacher.path=twin", "reference={path: twin, place: engines}")
    only_teachers = "must be auto, swapped or resident: engines do not score with the reference"
    assert refused == [f"reference.place: {only_teachers}"]
