"""Checks of the recipe that an SFT run is validated by (`validation.recipe`), over the run's own model."""

from collections.abc import Iterator

from rlctl.config.fields import RECIPE
from rlctl.config.schema import SftConfig
from rlctl.preflight.backend import Violation, Violations, unbroken
from rlctl.preflight.check_environment import check_environment
from rlctl.preflight.check_grpo import check_engines, check_rewards
from rlctl.preflight.check_inputs import check_data, check_generated, check_validation
from rlctl.preflight.check_model import check_chat, check_lengths
from rlctl.preflight.settled import SettledSft

# Keys of a recipe that the run's own values replace.
_OWN = ("model.path", "model.tokenizer", "lora.", "trainer.", "run.")


def check_recipe(settled: SettledSft, away: bool) -> Violations:
    """Find recipes with nothing to sample, another tokenizer, or values unfit for the run's model.

    away: the run is to be elsewhere, where installed packages are checked.
    """
    config, sampled = settled.config, settled.sampling
    recipe = config.validation.recipe
    if recipe is None or sampled is None:
        return
    if not recipe.data.has_validation:
        what = "is null, so that the recipe has no held-out prompts to sample: name them, or another recipe"
        yield Violation(f"{RECIPE}.data.validation.path", what)
    ours, theirs = config.model.tokenizer or config.model.path, recipe.model.tokenizer
    if theirs not in (None, ours):
        what = f"{theirs} is not the tokenizer that the run trains with, {ours}: set it to null, which is that one"
        yield Violation(f"{RECIPE}.model.tokenizer", what, ("model.tokenizer",))
    sampling, sizes = sampled.config, settled.facts
    checks = [check_lengths(sampled), check_chat(sampling), check_validation(sampling), check_data(sampling)]
    checks += [check_rewards(sampling), check_environment(sampling, sizes), check_engines(sampled, away)]
    checks += [] if away else [check_generated(sampling)]
    for violations in checks:
        for each in unbroken(violations):
            yield each._replace(key=_recipe_key(each.key), others=tuple(map(_recipe_key, each.others)))


def recipe_notes(config: SftConfig) -> Iterator[str]:
    """Yield differences between the run and its recipe that make a figure mean less than it seems to."""
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
