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
    # The recipe with the run's own values in place of those in `_OWN`.
    sampled = sampling.config
    checks = [check_lengths(sampling), check_chat(sampled), check_validation(sampled), check_data(sampled)]
    checks += [check_rewards(sampled), check_environment(sampled, settled.facts), check_engines(sampling, away)]
    if not away:
        checks.append(check_generated(sampled))
    for violations in checks:
        for violation in unbroken(violations):
            other_keys = tuple(_recipe_key(key) for key in violation.others)
            yield violation._replace(key=_recipe_key(violation.key), others=other_keys)


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
