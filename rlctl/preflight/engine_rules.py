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

    # Packages that its process imports.
    packages: tuple[str, ...] = ()
    # It computes with the adapters of `EngineSpec`, and proves after each refit that they are live.
    serves_adapters = False

    def check_model(self, generation: GenerationSection, sizes: ModelSizes, device: Device | None) -> Violations:
        """Yield problems with a model that it samples from on no device, or not by these keys.

        device: None if it is not known yet.
        """
        yield from ()

    def unserved(self, device: Device, path: str, sizes: ModelSizes) -> str | None:
        """Return why it cannot sample from the model in `path` on this device; None if it can, or is not known."""
        return None

    def float32_bound(self, device: Device, sizes: ModelSizes) -> float:
        """Return the largest `token_mult_prob_error` to the trainer in float32 that is rounding."""
        return UNMEASURED

    def options(self, section: EngineSection, device: Device) -> Mapping[str, Any]:
        """Return the values of its keys on this device, each `auto` and null settled."""
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
    own = {each.name for each in fields(kind.options)}
    owners = {each: other for other in ENGINES for each in keys_of(_engine_section(other))}
    foreign = {each for each in section.further if each in owners and each not in own}
    for each in foreign:
        has = f"has {', '.join(sorted(own))}" if own else "has no key of its own"
        yield Violation(f"{key}.{each}", f"unknown key here: a key of {owners[each]}; {name} {has}")
    given = {each: value for each, value in section.further.items() if each not in foreign}
    if given and not own:
        yield from (Violation(f"{key}.{each}", f"unknown key: {name} has no key of its own") for each in given)
        return
    problems = plugin_options(kind.options, load_object(ENGINE_OPTIONS_BASE), given, key)[1]
    yield from (Violation(each.key, each.what, (f"{key}.name",)) for each in problems)


def _engine_section(name: str) -> type[EngineSection]:
    """Return the section of an engine that comes with rlctl."""
    sections = sections_of(keys_of(GenerationSection)["engine"].type)
    return next(each for each in sections if name in literals(keys_of(each)["name"].type))


def engine_rules(section: EngineSection) -> EngineRules:
    """Return the rules of the engine that a section names."""
    if section.name not in ENGINES:
        return EngineRules()
    rules: EngineRules = importlib.import_module(f"rlctl.preflight.engines.{section.name}").ENGINE
    return rules
