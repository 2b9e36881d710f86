"""What is shipped agrees with the schema: no key too many, no field without a home for its default."""

from typing import Any

import pytest

from rlctl.config.builtin import CONFIGS, RECIPES, find
from rlctl.config.compose import compose
from rlctl.config.convert import Converter
from rlctl.config.fields import schema_keys
from rlctl.config.grpo_schema import RewardSection
from rlctl.config.provenance import MISSING, leaves, plain, read_file
from rlctl.config.schema import KINDS, WandbSection

FILES = sorted([*CONFIGS.glob("*.yaml"), *RECIPES.glob("*.yaml")])


def generic(key: str) -> str:
    return ".".join("N" if part.isdecimal() else part for part in key.split("."))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_is_in_the_schema(path: object) -> None:
    if path == CONFIGS / "reward.yaml":
        known = {key for key, _ in schema_keys(RewardSection)}
    elif path == CONFIGS / "tracker.yaml":
        known = {f"{name}.{key}" for name in ("wandb", "any") for key, _ in schema_keys(WandbSection)}
    else:
        known = {key for kind in KINDS.values() for key, _ in schema_keys(kind)} | {"defaults"}
    keys = {generic(key) for key, _ in leaves(read_file(path))}  # type: ignore[arg-type]
    assert {key for key in keys if key not in known and key.rpartition(".")[0] not in known} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_has_a_default_or_must_be_set(kind: str) -> None:
    root = compose(CONFIGS / f"{kind}.yaml", [])
    given = {key.removesuffix(".0").removesuffix(".1") for key, _ in leaves(root)}
    sections = {key.rpartition(".")[0] for key, _ in schema_keys(KINDS[kind])}
    wanted = {key for key, _ in schema_keys(KINDS[kind]) if key not in sections and ".N" not in key} - {"rewards.N"}
    assert {key for key in wanted if key not in given} == set()


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_obey_the_limits_of_the_schema(kind: str) -> None:
    root = compose(CONFIGS / f"{kind}.yaml", [])
    missing = {key for key, node in leaves(root) if node.value == MISSING}
    converter: Converter[Any] = Converter(KINDS[kind], "x.yaml")
    converter.convert(root)
    assert {problem.key for problem in converter.problems} == missing


def test_the_defaults_of_a_reward_are_complete() -> None:
    assert set(plain(read_file(CONFIGS / "reward.yaml"))) == {key for key, _ in schema_keys(RewardSection)}


def test_shipped_files_are_found_by_name_from_anywhere() -> None:
    assert find("grpo", beside=RECIPES.parent / "tests") == CONFIGS / "grpo.yaml"
