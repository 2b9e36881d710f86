"""Combinations of keys: some are refused, some have no effect and are noted, and the others pass without a word."""

from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError
from rlctl.preflight.load import load


def test_combinations_that_are_fine(home: Path) -> None:
    for overrides in (
        ["grpo.updates_per_step=4"],
        ["generation.top_p=0.9"],
        ["generation.top_k=20", "grpo.loss.importance_mask=[0.5, 5]"],
        ["grpo.loss.proximal=recompute", "grpo.loss.importance_cap=null"],
        ["model.path=Qwen/Qwen3-0.6B", "data.train.path=openai/gsm8k:main"],
        ["rewards=[{name: mine.py:brevity}]"],
        ["trainer.optimizer.lr=1"],
    ):
        load("grpo", "grpo.recipe.yaml", overrides)


def test_held_out_rows_of_a_shipped_recipe_next_to_rows_of_ones_own_are_noted(home: Path) -> None:
    own = "data.train.path=train.jsonl"
    (note,) = load("grpo", "grpo-tiny", [own]).notes
    assert note == (
        "data.validation.path: recipes/grpo-tiny.yaml:7: validation measures that recipe's own rows; "
        "data.validation.path=null data.validation.fraction=0.05 holds rows of data.train out"
    )
    for mend in (["data.validation.path=null", "data.validation.fraction=0.05"], ["data.validation.path=train.jsonl"]):
        assert load("grpo", "grpo-tiny", [own, *mend]).notes == []
    assert load("grpo", "grpo-tiny", [own, "validation.every=0", "validation.at_start=false"]).notes == []
    assert load("grpo", "grpo-tiny", []).notes == []


ASYNC = "async.enabled=true"
OLD = "async.max_trajectory_age_steps=2"


@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        ([ASYNC, "placement.colocated=true"], "placement.colocated", "devices of their own"),
        (
            [
                ASYNC,
                "async.recompute_kv_cache_after_weight_updates=true",
                "generation.reset_prefix_cache_after_weight_updates=false",
            ],
            "generation.reset_prefix_cache_after_weight_updates",
            "false keeps nothing",
        ),
        ([ASYNC, OLD, "grpo.loss.proximal=rollout"], "grpo.loss.proximal", "lets training collapse"),
        ([ASYNC, "grpo.loss.importance_cap=null"], "grpo.loss.importance_cap", "null without a mask leaves"),
        ([ASYNC, OLD, "grpo.loss={name: gspo, proximal: rollout}"], "grpo.loss.proximal", "lets training collapse"),
        (["grpo.loss=dppo", "generation.top_p=0.9"], "generation.top_p", "the ratios would be off; keep 1"),
        (["grpo.loss=cispo", "generation.top_k=9"], "generation.top_k", "keep 0 or set grpo.loss.proximal=recompute"),
        (["generation.top_p=0.9", "grpo.loss.sequence_mask=[0.99, 1.01]"], "grpo.loss.sequence_mask",
         "the lower bound must be below generation.top_p=0.9, which takes proximal / rollout down to it, not 0.99"),
        (["grpo.loss.importance_mask=[0.5, 5]"], "grpo.loss.importance_mask", "needs grpo.loss.proximal=recompute"),
        ([ASYNC, "grpo.loss.sequence_mask=[2, 1]"], "grpo.loss.sequence_mask", "must be [low, high] with low below"),
        ([ASYNC, "grpo.loss.force_on_policy_ratio=true", "grpo.updates_per_step=2"],
         "grpo.loss.force_on_policy_ratio", "the second of 2 updates"),
        (["generation.forced_lengths=[600]"], "generation.forced_lengths", "must be [mean, sigma], not [600.0]"),
        (["grpo.overlong.penalty_tokens=64"], "grpo.overlong.penalty_tokens",
         "must be below generation.max_new_tokens=64, not 64"),
        (["async.max_trajectory_age_steps=0"], "async.max_trajectory_age_steps", "must be at least 1, not 0"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_asynchronous_runs(home: Path, overrides: list[str], key: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("grpo", "grpo.recipe.yaml", overrides)
    assert [problem.key for problem in caught.value.problems] == [key]
    assert message in caught.value.problems[0].what


def test_asynchronous_runs_that_are_fine(home: Path) -> None:
    for overrides in (
        [ASYNC, OLD],
        [ASYNC, "async.in_flight_weight_updates=false"],
        [ASYNC, "grpo.loss.proximal=rollout"],
        # cispo and dppo bound the weight of a token, and do not clip around policies of this age.
        [ASYNC, OLD, "grpo.loss=cispo"],
        [ASYNC, OLD, "grpo.loss=dppo"],
        [ASYNC, "grpo.loss.importance_cap=null", "grpo.loss.importance_mask=[0.5, 5]"],
        [ASYNC, "async.on_bound=requeue", "async.policy=ready_first"],
    ):
        assert load("grpo", "grpo.recipe.yaml", overrides).notes == []
    assert load("grpo", "grpo.recipe.yaml", [OLD]).notes == [
        f"override 1: {OLD}: no effect while async.enabled is false"
    ]
    old = "async.max_trajectory_age_steps=8"
    assert load("grpo", "grpo.recipe.yaml", [ASYNC, old]).notes == [
        f"override 2: {old}: a lag above 4 steps costs accuracy (AReaL, arXiv 2505.24298, table 3)"
    ]
    # The note names no override: it also warns of values in a recipe, and nothing is without effect here.
    assert load("grpo", "grpo.recipe.yaml", [ASYNC, OLD, "async.in_flight_weight_updates=false"]).notes == [
        f"{OLD}: async.in_flight_weight_updates is false: rollouts end before each update, so a bound above 1 makes "
        "groups older and engines no busier; set 1"
    ]


def test_an_override_without_effect_is_a_note_and_a_default_without_effect_is_none(home: Path) -> None:
    assert load("grpo", "grpo.recipe.yaml", []).notes == []
    assert load("grpo", "grpo.recipe.yaml", ["grpo.loss.importance_cap=4"]).notes == [
        "override 1: grpo.loss.importance_cap=4: no effect while grpo.loss.proximal is rollout"
    ]
    assert load("grpo", "grpo.recipe.yaml", ["grpo.loss.kl_max=4"]).notes == [
        "override 1: grpo.loss.kl_max=4: no effect while grpo.loss.kl_coef is 0"
    ]
    unused = ["grpo.dynamic_sampling.max_extra=1", "grpo.overlong.penalty=2"]
    assert load("grpo", "grpo.recipe.yaml", unused).notes == [
        f"override 1: {unused[0]}: no effect while grpo.dynamic_sampling.filter is null",
        f"override 2: {unused[1]}: no effect while grpo.overlong.penalty_tokens is null",
    ]
    used = ["grpo.dynamic_sampling.filter=accuracy", "grpo.overlong.penalty_tokens=9"]
    assert load("grpo", "grpo.recipe.yaml", [*unused, *used]).notes == []


def test_no_reward_has_the_name_of_the_penalty(home: Path) -> None:
    Path("long.py").write_text("def overlong(prompt, completion, answer, row):\n    return 0.0\n")
    rewards = "rewards=[{name: exact}, {name: long.py:overlong}]"
    penalty = "grpo.overlong.penalty_tokens=9"
    load("grpo", "grpo.recipe.yaml", [rewards])
    with pytest.raises(ConfigError) as caught:
        load("grpo", "grpo.recipe.yaml", [rewards, penalty])
    assert [problem.key for problem in caught.value.problems] == ["rewards.1.name"]
    assert caught.value.problems[0].what.startswith("overlong is the name of the penalty")


def test_a_bound_of_a_ratio_that_is_1_is_a_note(home: Path) -> None:
    """With one update a step and recomputed log-probs, policy and old policy are equal, so that the ratio is 1."""
    clip = "grpo.loss.clip_high=0.3"
    note = f"override 1: {clip}: no effect while the ratio is 1: proximal recompute with one update a step"
    assert load("grpo", "grpo.recipe.yaml", [clip, ASYNC]).notes == [note]
    assert load("grpo", "grpo.recipe.yaml", [clip]).notes == []
    assert load("grpo", "grpo.recipe.yaml", [clip, ASYNC, "grpo.updates_per_step=2"]).notes == []


LOSS = (
    "from dataclasses import dataclass\nfrom rlctl.grpo.losses.base import PolicyLoss, PolicyTerm\n\n"
    "@dataclass(frozen=True)\nclass Mine(PolicyLoss):\n    columns = {}\n\n"
    "    def policy(self, tokens):\n        return PolicyTerm(-tokens.advantage * tokens.log_prob)\n"
)


def test_a_users_loss_has_the_columns_that_it_names_computed(home: Path) -> None:
    for number, columns in enumerate([(), ("reference_log_prob",)]):
        (home / f"mine{number}.py").write_text(LOSS.format(columns))
        settled = load("grpo", "grpo.recipe.yaml", [f"grpo.loss=mine{number}.py:Mine", ASYNC]).settled
        assert settled.frozen_roles == ("reference",) * len(columns)
        assert settled.computed_columns == dict.fromkeys(columns, "reference")
        assert settled.streams_training is not bool(columns)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("('teacher',)", "`columns` names 'teacher'; there are advantage, rollout_log_prob, proximal_log_prob, refe"),
        ("('reference',)", "`columns` names 'reference'; did you mean reference_log_prob?; there are advantage, rollo"),
        ("('age',)", "`columns` names 'age': a synchronous run has none, for no token is older than the weights; set "),
        ("'age'", "`columns` is 'age': give a tuple of names, for example ('reference_log_prob',)"),
    ],
)
def test_a_users_loss_that_names_a_column_that_is_none_is_told_so(home: Path, columns: str, message: str) -> None:
    (home / "mine.py").write_text(LOSS.format(columns))
    with pytest.raises(ConfigError) as caught:
        load("grpo", "grpo.recipe.yaml", ["grpo.loss=mine.py:Mine"])
    [problem] = caught.value.problems
    assert problem.key == "grpo.loss.name" and problem.what.startswith(message)


STREAMED = "async.streamed_training=true"
ADVANTAGE = (
    "from dataclasses import dataclass\nfrom rlctl.grpo.advantages.base import Advantage\n\n"
    "@dataclass(frozen=True)\nclass Mine(Advantage):\n    columns = {}\n\n"
    "    def __call__(self, rollouts):\n        return rollouts.reward\n"
)


def test_a_users_advantage_has_the_columns_that_it_names_computed_and_is_not_trained_in_parts(home: Path) -> None:
    (home / "mine.py").write_text(ADVANTAGE.format(("rollout_log_prob", "age", "reference_log_prob")))
    loaded = load("grpo", "grpo.recipe.yaml", [STREAMED, ASYNC, "grpo.advantage=mine.py:Mine"])
    settled = loaded.settled
    assert settled.frozen_roles == ("reference",)
    assert settled.computed_columns == {"reference_log_prob": "reference"} and not settled.streams_training
    assert loaded.notes == [
        f"override 1: {STREAMED}: no effect while reference_log_prob is computed for the whole step before its update"
    ]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (("advantage",), "`columns` names 'advantage': an advantage cannot read itself"),
        (("age",), "`columns` names 'age': a synchronous run has none, for no token is older than the weights; set as"),
        (("teacher",), "`columns` names 'teacher'; there are rollout_log_prob, proximal_log_prob, reference_log_prob"),
    ],
)
def test_a_column_that_an_advantage_cannot_have_is_told_before_anything_starts(
    home: Path, columns: tuple[str, ...], message: str
) -> None:
    (home / "mine.py").write_text(ADVANTAGE.format(columns))
    with pytest.raises(ConfigError) as caught:
        load("grpo", "grpo.recipe.yaml", ["grpo.advantage=mine.py:Mine"])
    [problem] = caught.value.problems
    assert problem.key == "grpo.advantage.name" and problem.what.startswith(message)


MEGATRON = ["trainer.backend=megatron", "trainer.megatron.optimizer_cpu_offload=true"]
FOR_LOG_PROBS = "trainer.offload_optimizer_for_logprob=true"
FOR_ENGINES = "trainer.offload_optimizer_for_generation=true"


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ([STREAMED, ASYNC], None),
        ([STREAMED], "async.enabled is false"),
        ([STREAMED, ASYNC, "grpo.updates_per_step=2"], "grpo.updates_per_step is 2"),
        (
            [STREAMED, ASYNC, "grpo.loss.kl_coef=0.1"],
            "reference_log_prob is computed for the whole step before its update",
        ),
        (
            [STREAMED, ASYNC, "grpo.advantage=batch_normalized"],
            "grpo.advantage.name is batch_normalized, which depends on all groups of the step",
        ),
        ([STREAMED.replace("true", "false"), ASYNC, "grpo.updates_per_step=2"], None),
    ],
)
def test_training_in_parts_without_effect_is_a_note(home: Path, overrides: list[str], reason: str | None) -> None:
    expected = [] if reason is None else [f"override 1: {STREAMED}: no effect while {reason}"]
    assert load("grpo", "grpo.recipe.yaml", overrides).notes == expected


def test_an_advantage_of_ones_own_that_needs_the_whole_step_is_not_trained_in_parts(home: Path) -> None:
    text = "from dataclasses import dataclass\nfrom rlctl.grpo.advantages.base import Advantage\n"
    text += "@dataclass(frozen=True)\nclass Mine(Advantage):\n"
    text += "    def __call__(self, rollouts):\n        return rollouts.reward\n"
    for scope in ("group", "batch"):
        name = f"{scope}_advantage.py"
        Path(name).write_text(text.replace("    def", f"    scope = '{scope}'\n    def"))
        settled = load("grpo", "grpo.recipe.yaml", [STREAMED, ASYNC, f"grpo.advantage={name}:Mine"]).settled
        assert settled.streams_training == (scope == "group")


def test_an_advantage_that_adds_nothing_or_that_a_filter_keeps_from_teaching_is_a_note(home: Path) -> None:
    def load_notes(*overrides: str) -> list[str]:
        return load("grpo", "grpo.recipe.yaml", list(overrides)).notes

    gdpo = "grpo.advantage.name=gdpo"
    note = f"{gdpo}: with one reward it is group_mean with normalize_std, normalised over the step once more"
    assert load_notes(gdpo) == [note]
    assert load_notes(gdpo, "grpo.overlong.penalty_tokens=9") == []
    rewards_filter = "grpo.dynamic_sampling.filter=rewards"
    (_, note_on_filter) = load_notes(gdpo, rewards_filter)
    assert note_on_filter.startswith(
        f"{gdpo}: {rewards_filter} leaves out groups whose rewards differ though their sums are equal"
    )
    without_baseline = "grpo.advantage={name: batch_normalized, baseline: none}"
    assert len(load_notes(without_baseline, rewards_filter)) == 1
    assert load_notes(without_baseline) == []
    assert load_notes(without_baseline.replace("none", "group_mean"), rewards_filter) == []


@pytest.mark.parametrize("switch", [FOR_LOG_PROBS, FOR_ENGINES])
def test_state_that_the_host_updates_cannot_move_too(home: Path, switch: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load("sft", "sft.recipe.yaml", [*MEGATRON, switch])
    [problem] = caught.value.problems
    assert str(problem).startswith("override 3: trainer.offload_optimizer_for_")
    assert "does not go with trainer.megatron.optimizer_cpu_offload=true" in str(problem)
    load("sft", "sft.recipe.yaml", MEGATRON)


@pytest.mark.parametrize(
    ("kind", "overrides", "reason"),
    [
        ("grpo", [FOR_LOG_PROBS], "no log-probs are computed before an update"),
        ("grpo", [FOR_LOG_PROBS, ASYNC], "no log-probs are computed before an update"),
        ("grpo", [FOR_LOG_PROBS, "grpo.loss.kl_coef=0.1"], None),
        ("grpo", [FOR_LOG_PROBS, ASYNC, "grpo.loss.force_on_policy_ratio=false"], None),
        ("grpo", [FOR_LOG_PROBS, "grpo.loss.kl_coef=0.1", FOR_ENGINES],
         "trainer.offload_optimizer_for_generation keeps it on the host until the update"),
        ("grpo", [FOR_ENGINES], None),
        ("grpo", [FOR_ENGINES, ASYNC], "engines have devices of their own"),
        ("grpo", [FOR_ENGINES, "placement.colocated=false"], "engines have devices of their own"),
        ("sft", [FOR_LOG_PROBS], "kind is sft"),
        ("sft", [FOR_ENGINES], "kind is sft"),
        ("sft", [FOR_ENGINES.replace("true", "false")], None),
    ],
)  # fmt: skip
def test_an_offload_without_effect_is_a_note(home: Path, kind: str, overrides: list[str], reason: str | None) -> None:
    expected = [] if reason is None else [f"override 1: {overrides[0]}: no effect while {reason}"]
    assert load(kind, f"{kind}.recipe.yaml", overrides).notes == expected
