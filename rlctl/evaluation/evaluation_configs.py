"""Configs for weights without a trainer: one to evaluate the weights, one to sample from them."""

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rlctl.config import paths
from rlctl.config.builtin import CONFIGS, runs_folder
from rlctl.config.compose import compose
from rlctl.config.errors import ConfigError, Problem
from rlctl.config.fields import RECIPE
from rlctl.config.provenance import Origin, plain
from rlctl.config.schema import GrpoConfig
from rlctl.environments.outcomes import EnvironmentSpec
from rlctl.evaluation.target import Target, find_target
from rlctl.models.model_files import ModelFiles
from rlctl.preflight.load import Composed, OtherVersionError, load
from rlctl.preflight.machine import RunMachine
from rlctl.preflight.placement import Placement, ResourceRequest, place, this_machine
from rlctl.preflight.settled import SettledGrpo, settle
from rlctl.run.run_dir import RunDir
from rlctl.utils.devices import count_gpus, device_memory
from rlctl.workers.user_logs import Emit

if TYPE_CHECKING:
    from rlctl.evaluation.evaluate import Evaluation


def config_of(target: Target, seed: int, system: str | None = None) -> tuple[GrpoConfig, int]:
    """Return the config of an engine with these weights, and the most tokens of an answer. Raises ConfigError.

    Weights of a GRPO run get the run's config. Other weights get the tiny recipe's config with the chat settings of
    their run, if there is one, and the default size of the KV cache. system: system prompt; None keeps the config's.
    """
    file = target.run / "config.yaml" if target.run else None
    recorded = RunDir(target.run).recorded_config() if target.run else {}
    is_grpo = recorded.get("kind") == "grpo"
    overrides = [*overrides_for(target), "generation.num_engines=1", f"run.seed={seed}"]
    defaults = plain(compose(CONFIGS / "grpo.yaml", []))["generation"]
    if not is_grpo:
        overrides.append(f"generation.kv_cache_mib={defaults['kv_cache_mib']}")
        for name in ("chat_template", "chat_template_kwargs", "system_prompt", "special_tokens"):
            setting = recorded.get("data", {}).get(name)
            if setting is not None:
                overrides.append(f"data.{name}={json.dumps(setting)}")
    if system is not None:
        overrides.append(f"data.system_prompt={json.dumps(system)}")
    try:
        recipe = str(file) if is_grpo else None
        config = load("grpo", recipe, [], resume=is_grpo, command_overrides=overrides).settled.config
    except OtherVersionError as error:
        reason = f"the run is of another version of rlctl ({error.sign}); name its weights alone: {target.model}"
        raise ConfigError([Problem(str(file), "", reason)]) from None
    # Returned apart, because a config with this default would be refused for a model of few positions.
    return config, config.generation.max_new_tokens if is_grpo else defaults["max_new_tokens"]


def checked_run(target: Target, scratch: Path) -> tuple[SettledGrpo, ModelFiles, Placement]:
    """Return the settled config, files and placement of one trainer rank and one engine that share this machine.

    Raises ConfigError, ModelError, PlacementError.
    """
    config, _ = config_of(target, 0)
    files = ModelFiles.prepare(config.model, scratch, seed=0)
    gpus = count_gpus()
    request = ResourceRequest(
        ranks=1, engines=1, colocated=gpus > 0, cpus_per_process=config.placement.cpus_per_process
    )
    placement = place(this_machine(min(gpus, 1)), request)
    memory = device_memory() if placement.device == "cuda" else None
    config = replace(config, placement=replace(config.placement, colocated=gpus > 0))
    return settle(config, RunMachine(placement.device, memory), files.facts.sizes), files, placement


def episodes_config(config: GrpoConfig, spec: EnvironmentSpec, memory_mib: int, max_new_tokens: int) -> GrpoConfig:
    """Return the config to try episodes of an environment `spec`, each once and without reward functions."""
    command = " ".join(map(shlex.quote, spec.agent.command)) if spec.agent else ""
    agent_function = spec.name if spec.agent and not command else None
    environment = replace(
        config.environment,
        name=None if spec.is_function or spec.agent else spec.name,
        args=spec.args,
        choices={},
        timeout_s=spec.timeout_s,
        max_retries=0,
        processes=1,
        memory_mib=memory_mib,
    )
    return replace(
        config,
        environment=environment,
        rollout=spec.name if spec.is_function else None,
        agent=replace(config.agent, name=agent_function, command=command or None, wrap=None),
        rewards=[],
        generation=replace(config.generation, max_new_tokens=max_new_tokens),
    )


def arguments_of(config: GrpoConfig, environment: str) -> dict[str, Any]:
    """Return the arguments that a run gives the environment of this name; empty if the run does not play it."""
    names = (environment, paths.resolve(environment, "plugin", Origin()))
    return next((choice.args for choice in config.environment.environments.values() if choice.name in names), {})


def overrides_for(target: Target) -> list[str]:
    """Return the overrides that make a config use the weights of `target`, without a run name and trackers."""
    model = [f"model.path={json.dumps(target.model)}", "model.tokenizer=null", "model.random_init=false", "lora=null"]
    return [*model, "telemetry.trackers=[]", "run.name=null"]


def measured_configs(
    target: Target, text: str, recipe: str | None, overrides: Sequence[str], data: Sequence[str], samples: int | None
) -> dict[str, Composed[SettledGrpo]]:
    """Return the config of each data set, by the data set's name. Raises ConfigError.

    text: the target as the user typed it. recipe: None means the config of the weights' run. data: paths of rows; empty
    means the validation rows of the config. samples: answers to each task; None means the config's number.
    """
    command_overrides = overrides_for(target)
    if samples is not None:
        command_overrides.append(f"validation.num_generations={samples}")
        if samples > 1:
            command_overrides.append("validation.temperature=${generation.temperature}")
    base = recipe or _recipe_of(target)
    composed = {}
    for name, rows in _named_paths(data):
        path = [f"data.validation.path={json.dumps(rows)}", "data.validation.fraction=null"] if rows else []
        remedy = f"rlctl eval {text} RECIPE"
        composed[name] = load_measured(
            base, command_overrides + path, list(overrides), is_own=recipe is None, remedy=remedy
        )
        if not composed[name].config.data.has_validation:
            reason = f"is null in {base}: there is nothing to evaluate; name rows with --data PATH"
            raise ConfigError([Problem("data.validation.path", "", reason)])
    return composed


def make_evaluation(
    text: str,
    emit: Emit,
    *,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
    data: Sequence[str] = (),
    samples: int | None = None,
    step: int | None = None,
    to: Path | None = None,
) -> "Evaluation":
    """Return the evaluation of the weights that `text` names, for `rlctl eval` and `rlctl.evaluate`.

    recipe, overrides, data, samples: see `measured_configs`. step: see `find_target`. to: folder for results; None
    means `evals` in the weights' run, or else `evals` here. Raises TargetError, ConfigError, DataError, ModelError.
    """
    target = find_target(text, runs_folder(), step)
    settings = measured_configs(target, text, recipe, overrides, data, samples)
    # The import of torch takes seconds.
    from rlctl.evaluation.evaluate import Evaluation

    return Evaluation(target, settings, to or (target.run / "evals" if target.run else Path("evals")), emit)


def _recipe_of(target: Target) -> str:
    """Return the path of the config of the weights' run. Raises ConfigError if the weights belong to no run."""
    if target.run is None:
        reason = "belongs to no run: name a recipe too, whose data and rewards it is measured by"
        raise ConfigError([Problem(target.model, "", reason)])
    return str(target.run / "config.yaml")


def load_measured(
    base: str, command_overrides: list[str], overrides: list[str], is_own: bool, remedy: str
) -> Composed[SettledGrpo]:
    """Load a recipe, or a run's config, to evaluate weights by. Raises ConfigError.

    command_overrides: overrides of rlctl. overrides: overrides of the user. is_own: `base` is the config of the
    weights' run. remedy: command with a recipe, for an error.
    """
    # Imported here, because the import takes 0.3 s and chats and tried environments do not need it.
    from rlctl.launch.prepare import RunRequest, prepare

    try:
        within = _recipe_key(Path(base)) if is_own else ""
        request = RunRequest(
            "grpo", base, overrides, is_of_run=is_own, command_overrides=command_overrides, within=within
        )
        return cast("Composed[SettledGrpo]", prepare(request, "checked").composed)
    except OtherVersionError as error:
        reason = f"the run is of another version of rlctl ({error.sign}); name a recipe that measures it: {remedy}"
        raise ConfigError([Problem(base, "", reason)]) from None


def _recipe_key(config: Path) -> str:
    """Return the key of the recipe within a run's config that the run validates by; empty for the config itself.

    Raises ConfigError for a run without rewards.
    """
    recorded = RunDir(config.parent).recorded_config()
    if recorded.get("kind") == "grpo":
        return ""
    if (recorded.get("validation") or {}).get("recipe"):
        return RECIPE
    reason = "is a run without rewards: name a GRPO recipe too, whose data and rewards it is measured by"
    raise ConfigError([Problem(str(config.parent), "", reason)])


def _named_paths(data: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield (unique name, path) of each data set. An empty path means the config's validation rows."""
    used: dict[str, int] = {}
    for path in data or [""]:
        name = Path(path).name.partition(".")[0] if path else "validation"
        used[name] = used.get(name, 0) + 1
        yield (f"{name}-{used[name]}" if used[name] > 1 else name), path
