"""Weights without a trainer, as `rlctl eval`, `rlctl chat` and `rlctl env check` take them: config, errors."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

from rlctl.cli.output import FAILED, INTERRUPTED, refuse, say
from rlctl.config.errors import ConfigError, Problem, UserError

if TYPE_CHECKING:
    from rlctl.config.schema import GrpoConfig
    from rlctl.evaluation.target import Target


def config_of(target: "Target", seed: int, system: str | None = None) -> "tuple[GrpoConfig, int]":
    """Return the config of an engine with these weights, and the most tokens of an answer. Raises ConfigError.

    Weights of no GRPO run have the tiny recipe's config, without its data, and the defaults of generation.
    """
    import yaml

    from rlctl.config.builtin import CONFIGS
    from rlctl.config.compose import compose
    from rlctl.config.provenance import plain
    from rlctl.config.schema import GrpoConfig
    from rlctl.preflight.load import OtherVersionError, load

    file = target.run / "config.yaml" if target.run else None
    kept = yaml.safe_load(file.read_text(encoding="utf-8")) if file else {}
    is_own = kept.get("kind") == "grpo"
    given = [*overrides_for(target), "generation.num_engines=1", f"run.seed={seed}"]
    defaults = plain(compose(CONFIGS / "grpo.yaml", []))["generation"]
    if not is_own:
        given.append(f"generation.kv_cache_mib={defaults['kv_cache_mib']}")
        own = {name: kept.get("data", {}).get(name) for name in ("chat_template", "system_prompt", "special_tokens")}
        given += [f"data.{name}={json.dumps(value)}" for name, value in own.items() if value is not None]
    if system is not None:
        given.append(f"data.system_prompt={json.dumps(system)}")
    try:
        config = load("grpo", str(file) if is_own else None, given, resume=is_own).config
    except OtherVersionError as error:
        what = f"the run is of another version of rlctl ({error.sign}); name its weights alone: {target.model}"
        raise ConfigError([Problem(str(file), "", what)]) from None
    assert isinstance(config, GrpoConfig)
    # A model of few positions could not have the default in its config.
    return config, config.generation.max_new_tokens if is_own else defaults["max_new_tokens"]


def arguments_of(config: "GrpoConfig", environment: str) -> dict[str, Any]:
    """Return the arguments that a run gives the environment of this name; none if it plays another one."""
    from rlctl.config import paths
    from rlctl.config.provenance import Origin

    names = (environment, paths.resolve(environment, "plugin", Origin()))
    return next((each.args for each in config.environment.named.values() if each.name in names), {})


def overrides_for(target: "Target") -> list[str]:
    """Return the overrides by which a config takes the weights of `target`, and is of no run of its own."""
    own = [f"model.path={json.dumps(target.model)}", "model.tokenizer=null", "model.random_init=false"]
    return [*own, "telemetry.trackers=[]", "run.name=null"]


def tell(kind: str, **what: Any) -> None:
    """Print warnings of engines that sample."""
    if kind in ("warning", "engine_restarted", "engine_gone"):
        say(f"note: {what.get('what') or f'{kind}: {what}'}", err=True)


@contextmanager
def explained_weights(interrupted: str) -> Iterator[None]:
    """End a command with one line and the right exit code for bad weights, data or engines.

    interrupted: the line for Ctrl-C.
    """
    try:
        yield
    except ConfigError:
        raise
    except UserError as error:
        refuse(error)
    except RuntimeError as error:
        say(f"error: {error}", err=True)
        raise typer.Exit(FAILED) from None
    except KeyboardInterrupt:
        say(interrupted, err=True)
        raise typer.Exit(INTERRUPTED) from None
