"""`validation.recipe`: the GRPO recipe by which an SFT run measures answers is a part of its config."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlctl.config.builtin import RECIPES
from rlctl.config.errors import ConfigError
from rlctl.config.fields import RECIPE
from rlctl.config.schema import GrpoConfig, SftConfig
from rlctl.models.model_sizes import read_sizes
from rlctl.preflight.load import Composed, load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.placement import requested_resources, this_machine
from rlctl.preflight.plan import make_plan
from rlctl.preflight.settled import SettledSft

GIB = 1 << 30
NAMED = f"{RECIPE}=grpo-tiny"


def load_sft(*overrides: str, recipe: str = "sft-tiny") -> Composed[SettledSft]:
    return load("sft", recipe, list(overrides))


def sampling_config(*overrides: str) -> GrpoConfig:
    settled = load_sft(*overrides).settled.sampling
    assert settled
    return settled.config


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_sft(*overrides)
    return [str(problem) for problem in caught.value.problems]


def test_a_name_becomes_the_whole_recipe_whose_keys_are_set_in_any_order() -> None:
    expected_recipe = load("grpo", "grpo-tiny", ["validation.max_prompts=20"]).config
    for overrides in ([NAMED, f"{RECIPE}.validation.max_prompts=20"], [f"{RECIPE}.validation.max_prompts=20", NAMED]):
        config = load_sft(*overrides).config
        assert isinstance(config, SftConfig) and config.validation.recipe == expected_recipe


def test_a_recipe_of_ones_own_is_found_beside_the_file_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: grpo-tiny\nvalidation: {num_generations: 4, temperature: '${generation.temperature}'}\n"
        "generation: {temperature: 0.5}\n"
    )
    (tmp_path / "run.yaml").write_text("defaults: sft-tiny\nvalidation: {recipe: mine}\n")
    composed = load_sft(recipe=str(tmp_path / "run.yaml"))
    assert isinstance(composed.config, SftConfig) and composed.config.validation.recipe
    # ${generation.temperature} in the recipe refers to the recipe, not to the SFT run.
    assert composed.config.validation.recipe.validation.temperature == 0.5
    assert str(composed.origins[f"{RECIPE}.validation.num_generations"]) == f"{tmp_path}/mine.yaml:2"


def test_the_runs_config_holds_the_recipe_and_needs_its_file_no_more(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("defaults: grpo-tiny\nvalidation: {num_generations: 4, temperature: 1}\n")
    composed = load_sft(f"{RECIPE}={tmp_path}/mine.yaml")
    (tmp_path / "config.yaml").write_text(composed.to_yaml())
    (tmp_path / "mine.yaml").unlink()
    resumed = load("sft", str(tmp_path / "config.yaml"), [], resume=True)
    assert resumed.config == composed.config
    assert resumed.to_yaml() == composed.to_yaml()
    # `rlctl eval` of the run takes it from there.
    evaluation = load("grpo", str(tmp_path / "config.yaml"), ["run.seed=3"], resume=True, within=RECIPE)
    assert isinstance(composed.config, SftConfig) and isinstance(evaluation.config, GrpoConfig)
    assert evaluation.config.validation == composed.config.validation.recipe.validation  # type: ignore[union-attr]
    assert f"num_generations: 4  # from {tmp_path}/mine.yaml:2" in evaluation.to_yaml()
    assert load("sft", str(tmp_path / "config.yaml"), [f"{RECIPE}=null"], resume=True).config == load_sft().config


def test_weights_and_trainer_are_the_runs_and_the_rest_is_the_recipes() -> None:
    config = load_sft(NAMED, "run.seed=5", "run.deadline_s=60", "trainer.threads=3", f"{RECIPE}.run.seed=7").config
    recipe = sampling_config(NAMED, "run.seed=5", "run.deadline_s=60", "trainer.threads=3", f"{RECIPE}.run.seed=7")
    assert (recipe.model, recipe.trainer, recipe.run) == (config.model, config.trainer, replace(config.run, seed=7))
    alone = load("grpo", "grpo-tiny", []).config
    assert isinstance(alone, GrpoConfig)
    assert (recipe.data, recipe.rewards, recipe.generation) == (alone.data, alone.rewards, alone.generation)
    assert load_sft().settled.sampling is None
    assert load_sft(NAMED, "validation.every=0").settled.sampling is None


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([f"{RECIPE}=grpo-tyni"], "no such recipe or file: grpo-tyni; did you mean grpo-tiny?"),
        ([f"{RECIPE}=sft-tiny"], "must be the name or file of a GRPO recipe, .*; sft-tiny is one for sft"),
        ([f"{RECIPE}=[grpo-tiny]"], "must be the name or file of a GRPO recipe"),
        ([f"{RECIPE}.run.seed=3"], f"there is no recipe that it is a key of: add {RECIPE}=NAME"),
        ([NAMED, f"{RECIPE}.validation.max_promts=3"], "unknown key; did you mean max_prompts?"),
        ([NAMED, f"{RECIPE}.validation.max_prompts=0"], "must be at least 1, not 0"),
        ([NAMED, f"{RECIPE}.data.validation.path=null"], "has no held-out prompts to sample"),
        ([NAMED, f"{RECIPE}.model.tokenizer=tiny/qwen3-games"], "is not the tokenizer that the run trains with"),
        ([NAMED, f"{RECIPE}.rewards=[exakt]"], f"{RECIPE}.rewards.0.name: .*did you mean exact?"),
        (
            [NAMED, f"{RECIPE}.rewards=[{{name: model, path: tiny/qwen3-tiny}}]"],
            f"{RECIPE}.rewards.0.name: must be another reward: an SFT run has no place for a reward model",
        ),
        ([NAMED, f"{RECIPE}.environment.name=gess"], "did you mean guess?"),
        ([NAMED, f"{RECIPE}.generation.max_new_tokens=400"], "must be below the longest sequence, 64, not 400"),
        ([NAMED, f"{RECIPE}.generation.tensor_parallel_size=3"], "must divide the model's 4 attention heads"),
        ([NAMED, f"{RECIPE}.validation.num_generations=4"], "4 greedy answers are all the same"),
    ],
)
def test_whatever_is_wrong_with_it_is_said_before_anything_starts(overrides: list[str], line: str) -> None:
    (problem,) = problems(*overrides)
    assert re.search(line.replace("?", r"\?"), problem), problem


def test_a_grpo_run_has_none() -> None:
    with pytest.raises(ConfigError, match=r"validation\.recipe is of another kind of run"):
        load("grpo", "grpo-tiny", [f"{RECIPE}=grpo-tiny"])


def test_what_would_make_a_figure_mean_less_is_noted() -> None:
    assert load_sft(NAMED).notes == []
    (note,) = load_sft(NAMED, "validation.every=0").notes
    assert note == f"{RECIPE}: no effect while validation.every is 0"
    (note,) = load_sft(NAMED, f"{RECIPE}.data.chat_template=none").notes
    assert note == f"{RECIPE}.data.chat_template: is not the data.chat_template that the run trains with"


def test_a_checkpoint_may_be_best_by_its_accuracy() -> None:
    assert load_sft(NAMED, "checkpoint.metric=validation/accuracy").notes == []
    assert load_sft(NAMED, "checkpoint.metric=-validation/loss").notes == []
    (note,) = load_sft("checkpoint.metric=validation/accuracy").notes
    assert "it is measured only where answers are sampled" in note


def test_its_engines_are_placed_and_tuned_beside_the_trainer() -> None:
    sizes = read_sizes(RECIPES / "tiny/qwen3-tiny/config.json")
    assert sizes
    run = load_sft(NAMED, f"{RECIPE}.generation.num_engines=2", "trainer.num_ranks=2").settled
    request = requested_resources(run)
    assert (request.ranks, request.engines, request.colocated) == (2, 2, True)
    apart = load_sft(NAMED, f"{RECIPE}.placement.colocated=false").settled
    assert not requested_resources(apart).colocated
    settled = run.settle_on(RunMachine("cuda", 80 * GIB), sizes)
    sampling = settled.sampling
    assert sampling and sampling.generation.sleep is False and sampling.generation.cache_mib
    assert sampling.trainer == settled.trainer
    assert {choice.key for choice in settled.choices} >= {"trainer.compile", f"{RECIPE}.generation.sleep"}
    plan = make_plan(settled, this_machine(2))
    assert plan.placement and len(plan.placement.engines) == 2 and plan.refit == sizes.parameters * 2
    assert plan.memory and plan.memory.shared and set(plan.memory.placed_states) == {
        "generate", "train", "refit", "checkpoint"
    }  # fmt: skip
