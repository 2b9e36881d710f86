"""Checks of `validation.recipe`, the GRPO recipe by which an SFT run samples and scores answers of its model."""

from collections.abc import Iterator

from rlctl.config.fields import RECIPE
from rlctl.config.plugins import model_rewards, served_judges
from rlctl.config.schema import SftConfig
from rlctl.preflight.backend import Violation, Violations, unbroken
from rlctl.preflight.check_environment import check_environment
from rlctl.preflight.check_grpo import check_engines, check_rewards
from rlctl.preflight.check_inputs import check_data, check_generated, check_validation
from rlctl.preflight.check_model import check_chat, check_lengths
from rlctl.preflight.check_sandbox import check_sandbox
from rlctl.preflight.settled import SettledSft

# Keys of the recipe whose values are replaced by the SFT run's.
_OWN = ("model.path", "model.tokenizer", "lora.", "trainer.", "run.")


def check_recipe(settled: SettledSft, away: bool) -> Violations:
    """Find a recipe without prompts, with another tokenizer, or with values that do not fit the run's model.

    away: the run will be on another machine, so that installed packages are not checked here.
    """
    config = settled.config
    recipe = config.validation.recipe
    sampling = settled.sampling
    if recipe is None or sampling is None:
        return
    if not recipe.data.has_validation:
        message = "is null, so that the recipe has no held-out prompts to sample: name them, or another recipe"
        yield Violation(f"{RECIPE}.data.validation.path", message)
    run_tokenizer = config.model.tokenizer or config.model.path
    recipe_tokenizer = recipe.model.tokenizer
    if recipe_tokenizer not in (None, run_tokenizer):
        message = f"{recipe_tokenizer} is not the tokenizer that the run trains with, {run_tokenizer}"
        message = f"{message}: set it to null, which is that one"
        yield Violation(f"{RECIPE}.model.tokenizer", message, ("model.tokenizer",))
    # The recipe with the SFT run's values for the keys of `_OWN`.
    sampled = sampling.config
    checks = [check_lengths(sampling), check_chat(sampled), check_validation(sampled), check_data(sampled)]
    for index in sorted([*model_rewards(sampled.rewards), *served_judges(sampled.rewards)]):
        message = "must be another reward: an SFT run has no place for a reward model; set rewards of functions"
        yield Violation(f"{RECIPE}.rewards.{index}.name", message)
    checks += [check_rewards(sampled), check_environment(sampled, settled.facts), check_engines(sampling, away)]
    checks.append(check_sandbox(sampled, away))
    if not away:
        checks.append(check_generated(sampled))
    for violations in checks:
        for violation in unbroken(violations):
            other_keys = tuple(_recipe_key(key) for key in violation.others)
            yield violation._replace(key=_recipe_key(violation.key), others=other_keys)


def recipe_notes(config: SftConfig) -> Iterator[str]:
    """Yield notes on differences between run and recipe, because they make validation figures hard to compare."""
    recipe = config.validation.recipe
    if recipe is None:
        return
    if config.validation.every == 0:
        yield f"{RECIPE}: no effect while validation.every is 0"
        return
    if recipe.model.path != config.model.path:
        yield f"{RECIPE}: is for {recipe.model.path}; its prompts and lengths measure {config.model.path} here"
    for key in ("system_prompt", "chat_template", "chat_template_kwargs", "special_tokens"):
        if getattr(recipe.data, key) != getattr(config.data, key):
            yield f"{RECIPE}.data.{key}: is not the data.{key} that the run trains with"


def _recipe_key(key: str) -> str:
    return key if key.startswith(_OWN) else f"{RECIPE}.{key}"
