"""Interface of an inference engine before a run starts: packages, limits, values of its keys.

An engine called NAME has an object `ENGINE`, an `EngineRules`, in `preflight/engines/NAME.py`, and its code in
`generation/NAME/`. A run imports both by that name. A few other modules name vLLM: `bench/`, the checks of the
installation, and messages that propose `vllm serve` for weights of any engine. A user's engine has no rules.
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

# `float32_bound` of engines and devices without measurements.
UNMEASURED = 1.001


class EngineRules:
    """Rules of one kind of engine. Every method is pure. A check finds nothing unless an engine overrides it."""

    # Packages that the engine's process imports.
    packages: tuple[str, ...] = ()
    # True if the engine applies the adapters of `EngineSpec`, and verifies after each refit that it uses the new ones.
    serves_adapters = False

    def check_model(self, generation: GenerationSection, sizes: ModelSizes, device: Device | None) -> Violations:
        """Yield problems of a model that the engine supports on no device, or not with these keys.

        device: None if it is not known yet.
        """
        yield from ()

    def find_refusal(self, device: Device, path: str, sizes: ModelSizes) -> str | None:
        """Return why the engine cannot sample from the model in `path` on this device.

        None if the engine can, or if nobody knows.
        """
        return None

    def float32_bound(self, device: Device, sizes: ModelSizes) -> float:
        """Return the largest `token_mult_prob_error` between engine and trainer that float32 rounding explains."""
        return UNMEASURED

    def options(self, section: EngineSection, device: Device) -> Mapping[str, Any]:
        """Return the values of the engine's keys on this device. Each `auto` and null has a value."""
        return {}


def check_engine_options(section: UserEngineSection) -> Violations:
    """Import a user's engine. Find mistakes of its class and of its keys."""
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
    # A key of another engine is named as such, and is left out of the checks below.
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
    """Return the section class of one of rlctl's engines."""
    sections = sections_of(keys_of(GenerationSection)["engine"].type)
    return next(section for section in sections if name in literals(keys_of(section)["name"].type))


def engine_rules(section: EngineSection) -> EngineRules:
    """Return the rules of the engine that `section` names."""
    if section.name not in ENGINES:
        return EngineRules()
    rules: EngineRules = importlib.import_module(f"rlctl.preflight.engines.{section.name}").ENGINE
    return rules
