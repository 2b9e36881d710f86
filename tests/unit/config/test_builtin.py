"""Shipped files agree with the schema: no key too many, no field without a home for its default."""

from pathlib import Path
from typing import Any

import pytest

from rlctl.config.builtin import CONFIGS, RECIPES, find
from rlctl.config.compose import NAMED_SECTIONS, OPTIONAL_SECTIONS, compose, defaults_of
from rlctl.config.convert import Converter
from rlctl.config.data_schema import SourceSection
from rlctl.config.environment_schema import EnvironmentChoice
from rlctl.config.fields import FURTHER, keys_of, literals, schema_keys, sections_of
from rlctl.config.grpo_schema import RewardSection
from rlctl.config.provenance import MISSING, leaves, plain, read_file
from rlctl.config.schema import KINDS
from rlctl.config.telemetry_schema import TrackerSection
from rlctl.config.trainer_schema import LoraSection
from rlctl.grpo.advantages.sections import AnyAdvantageSection
from rlctl.grpo.losses.sections import AnyLossSection
from rlctl.preflight.engines.sections import AnyEngineSection

FILES = sorted([*CONFIGS.glob("*.yaml"), *RECIPES.glob("*.yaml")])


def generic(key: str) -> str:
    return ".".join("N" if part.isdecimal() else part for part in key.split("."))


# The files of sections with defaults by name, each with the type of its section.
NAMED = {
    "reward": RewardSection,
    "environment": EnvironmentChoice,
    "source": SourceSection,
    "tracker": TrackerSection,
    "loss": AnyLossSection,
    "engine": AnyEngineSection,
    "advantage": AnyAdvantageSection,
    "lora": LoraSection,
}


@pytest.mark.parametrize("path", [path for path in FILES if path.stem not in NAMED], ids=lambda path: path.name)
def test_every_key_is_in_the_schema(path: Path) -> None:
    known = {key for kind in KINDS.values() for key, _ in schema_keys(kind)} | {"defaults"}
    keys = {generic(key) for key, _ in leaves(read_file(path))}
    assert {key for key in keys if key not in known and key.rpartition(".")[0] not in known} == set()


@pytest.mark.parametrize("kind", NAMED)
def test_what_is_named_has_the_defaults_of_its_keys_and_no_others(kind: str) -> None:
    names = set()
    for section in sections_of(NAMED[kind]):
        keys = keys_of(section)
        for name in (literals(keys["name"].type) if "name" in keys else []) or [""]:
            names.add(name)
            assert set(plain(defaults_of(kind, name))) == {key for key in keys if key != FURTHER}, name
    assert set(plain(read_file(CONFIGS / f"{kind}.yaml"))) - {"all"} <= names


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_default_or_must_be_set(kind: str) -> None:
    root = compose(CONFIGS / f"{kind}.yaml", [])
    given = {key.removesuffix(".0").removesuffix(".1") for key, _ in leaves(root)}
    sections = {key.rpartition(".")[0] for key, _ in schema_keys(KINDS[kind])}
    wanted = {key for key, _ in schema_keys(KINDS[kind]) if key not in sections and ".N" not in key} - {"rewards.N"}
    # Keys of named sections are those of one name: the test above has them all.
    apart = tuple(f"{each}." for each in (*NAMED_SECTIONS, *OPTIONAL_SECTIONS))
    assert {key for key in wanted - given if not key.startswith(apart)} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_obey_the_limits_of_the_schema(kind: str) -> None:
    root = compose(CONFIGS / f"{kind}.yaml", [])
    missing = {key for key, node in leaves(root) if node.value == MISSING}
    converter: Converter[Any] = Converter(KINDS[kind], "x.yaml")
    converter.convert(root)
    assert {problem.key for problem in converter.problems} == missing


def test_shipped_files_are_found_by_name_from_anywhere() -> None:
    assert find("grpo", near=RECIPES.parent / "tests") == CONFIGS / "grpo.yaml"
