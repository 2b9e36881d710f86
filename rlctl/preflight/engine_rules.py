"""Interface of an engine before anything starts: packages, limits, the values of its keys.

An engine NAME is two things: `ENGINE` in `preflight/engines/NAME.py`, an `EngineRules`, and `generation/NAME/`. A run
imports these by that name alone. vLLM is named besides in `bench/`, which measures its parts, in checks of the
installation, and in proposals of `vllm serve`, for weights that any engine sampled from. An engine of the user's has no
rules.
"""

import importlib
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from rlctl.config.fields import keys_of, literals, sections_of
from rlctl.config.grpo_schema import EngineSection, GenerationSection, UserEngineSection
from rlctl.config.plugin_options import plugin_options
from rlctl.config.plugins import ENGINE_BASE, ENGINE_OPTIONS_BASE, ENGINES
from rlctl.models.facts import ModelSizes
from rlctl.preflight.backend import Violation, Violations
from rlctl.preflight.machine import Device
from rlctl.utils.user_code import import_error, load_object

# Bound in float32 for engines and devices without measurements.
UNMEASURED = 1.001


class EngineRules:
    """Rules of one kind of engine. Every method is pure, and finds nothing unless an engine has something."""

    # Packages that the engine's process imports.
    packages: tuple[str, ...] = ()
    # The engine computes with the adapters of `EngineSpec`, and proves after each refit that they are live.
    serves_adapters = False

    def check_model(self, generation: GenerationSection, sizes: ModelSizes, device: Device | None) -> Violations:
        """Yield problems with a model that the engine samples from on no device, or not by these keys.

        device: None if it is not known yet.
        """
        yield from ()

    def find_refusal(self, device: Device, path: str, sizes: ModelSizes) -> str | None:
        """Return why the engine cannot sample from the model in `path` on this device.

        None if the engine can, or if that is not known.
        """
        return None

    def float32_bound(self, device: Device, sizes: ModelSizes) -> float:
        """Return the largest `token_mult_prob_error` to the trainer in float32 that is rounding."""
        return UNMEASURED

    def options(self, section: EngineSection, device: Device) -> Mapping[str, Any]:
        """Return the values of the engine's keys on this device, each `auto` and null settled."""
        return {}


def check_engine_options(section: UserEngineSection) -> Violations:
    """Find mistakes in an engine of the user's, which is imported, and in its keys."""
    key = "generation.engine"
    try:
        kind = load_object(section.name)
    except (Exception, SystemExit) as error:
        yield Violation(f"{key}.name", import_error(error, __file__))
        return
    if not isinstance(kind, load_object(ENGINE_BASE)):
        yield Violation(f"{key}.name", f"must be an EngineKind, as generation/README.md has it, not {kind!r:.60}")
        return
    name = section.name.rpartition("/")[2]
    options = {field.name for field in fields(kind.options)}
    has_options = f"has {', '.join(sorted(options))}" if options else "has no key of its own"
    engine_by_option: dict[str, str] = {}
    for engine in ENGINES:
        engine_by_option |= dict.fromkeys(keys_of(_engine_section(engine)), engine)
    written = dict(section.further)
    for option in section.further:
        if option in engine_by_option and option not in options:
            del written[option]
            message = f"unknown key here: a key of {engine_by_option[option]}; {name} {has_options}"
            yield Violation(f"{key}.{option}", message)
    if written and not options:
        yield from (Violation(f"{key}.{option}", f"unknown key: {name} {has_options}") for option in written)
        return
    _, problems = plugin_options(kind.options, load_object(ENGINE_OPTIONS_BASE), written, key)
    yield from (Violation(problem.key, problem.what, (f"{key}.name",)) for problem in problems)


def _engine_section(name: str) -> type[EngineSection]:
    """Return the section of an engine that comes with rlctl."""
    sections = sections_of(keys_of(GenerationSection)["engine"].type)
    return next(section for section in sections if name in literals(keys_of(section)["name"].type))


def engine_rules(section: EngineSection) -> EngineRules:
    """Return the rules of the engine that a section names."""
    if section.name not in ENGINES:
        return EngineRules()
    rules: EngineRules = importlib.import_module(f"rlctl.preflight.engines.{section.name}").ENGINE
    return rules
