"""Shipped files agree with the schema: no key too many, no field without a home for its default."""

from pathlib import Path
from typing import Any

import pytest

from rlctl.config.builtin import CONFIGS, RECIPES, find
from rlctl.config.compose import NAMED_SECTIONS, OPTIONAL_SECTIONS, compose, defaults_of
from rlctl.config.convert import Converter
from rlctl.config.critic_schema import CriticSection
from rlctl.config.data_schema import SourceSection
from rlctl.config.environment_schema import EnvironmentChoice
from rlctl.config.fields import FURTHER, keys_of, literals, schema_keys, sections_of
from rlctl.config.provenance import MISSING, leaves, plain, read_file
from rlctl.config.role_schema import DistillationSection, RoleSection, TeacherSection
from rlctl.config.schema import KINDS
from rlctl.config.telemetry_schema import TrackerSection
from rlctl.config.trainer_schema import LoraSection
from rlctl.grpo.advantages.sections import AnyAdvantageSection
from rlctl.grpo.losses.sections import AnyLossSection
from rlctl.preflight.engines.sections import AnyEngineSection
from rlctl.rewards.judge.sections import AnyReward

FILES = sorted([*CONFIGS.glob("*.yaml"), *RECIPES.glob("*.yaml")])


def replace_numbers(key: str) -> str:
    """Write N for the number of each list entry, as the schema does."""
    return ".".join("N" if part.isdecimal() else part for part in key.split("."))


# The files of sections with defaults by name, each with the type of its section.
NAMED = {
    "reward": AnyReward,
    "environment": EnvironmentChoice,
    "source": SourceSection,
    "tracker": TrackerSection,
    "loss": AnyLossSection,
    "engine": AnyEngineSection,
    "advantage": AnyAdvantageSection,
    "lora": LoraSection,
    "teacher": TeacherSection,
    "role": RoleSection,
    "critic": CriticSection,
    "distillation": DistillationSection,
}


@pytest.mark.parametrize("path", [path for path in FILES if path.stem not in NAMED], ids=lambda path: path.name)
def test_every_key_is_in_the_schema(path: Path) -> None:
    allowed_keys = {"defaults"}
    for kind in KINDS.values():
        allowed_keys |= {key for key, _ in schema_keys(kind)}
    file_keys = {replace_numbers(key) for key, _ in leaves(read_file(path))}
    unknown_keys = file_keys - allowed_keys
    assert {key for key in unknown_keys if key.rpartition(".")[0] not in allowed_keys} == set()


@pytest.mark.parametrize("kind", NAMED)
def test_what_is_named_has_the_defaults_of_its_keys_and_no_others(kind: str) -> None:
    names = set()
    for section in sections_of(NAMED[kind]):
        keys = keys_of(section)
        section_names = literals(keys["name"].type) if "name" in keys else []
        for name in section_names or [""]:
            names.add(name)
            assert set(plain(defaults_of(kind, name))) == set(keys) - {FURTHER}, name
    # Defaults of an optional section may depend on the first part of its key.
    names |= {key.partition(".")[0] for key, file in OPTIONAL_SECTIONS.items() if file == kind}
    assert set(plain(read_file(CONFIGS / f"{kind}.yaml"))) - {"all", "other"} <= names


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_default_or_must_be_set(kind: str) -> None:
    root = compose(CONFIGS / f"{kind}.yaml", [])
    default_keys = {key.removesuffix(".0").removesuffix(".1") for key, _ in leaves(root)}
    keys = {key for key, _ in schema_keys(KINDS[kind])}
    sections = {key.rpartition(".")[0] for key in keys}
    expected_keys = {key for key in keys - sections if ".N" not in key}
    # A config has the keys of only one name in each named section. The test above has them all.
    optional_sections = [*NAMED_SECTIONS, *OPTIONAL_SECTIONS]
    prefixes = tuple(f"{section}." for section in optional_sections)
    assert {key for key in expected_keys - default_keys if not key.startswith(prefixes)} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_obey_the_limits_of_the_schema(kind: str) -> None:
    root = compose(CONFIGS / f"{kind}.yaml", [])
    missing = {key for key, node in leaves(root) if node.value == MISSING}
    converter: Converter[Any] = Converter(KINDS[kind], "x.yaml")
    converter.convert(root)
    assert {problem.key for problem in converter.problems} == missing


def test_shipped_files_are_found_by_name_from_anywhere() -> None:
    assert find("grpo", near=RECIPES.parent / "tests") == CONFIGS / "grpo.yaml"
