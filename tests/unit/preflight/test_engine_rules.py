"""Keys of an engine are in a config section with the engine's name, and all engines' rules have one interface."""

from pathlib import Path

import pytest

from rlctl.config.errors import ConfigError
from rlctl.config.schema import GrpoConfig
from rlctl.generation.spec import engine_options
from rlctl.preflight.engine_rules import engine_rules
from rlctl.preflight.load import load

TORCH = Path(__file__).parents[2] / "plugins" / "torch_engine.py"
NAME = f"generation.engine={TORCH}:KIND"


def config_of(*overrides: str) -> GrpoConfig:
    config = load("grpo", "grpo.recipe.yaml", list(overrides)).config
    assert isinstance(config, GrpoConfig)
    return config


def problems(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        config_of(*overrides)
    return [f"{problem.key}: {problem.what}" for problem in caught.value.problems]


def test_vllms_keys_are_settled_by_the_device(home: Path) -> None:
    default_section = config_of().generation.engine
    assert engine_options(default_section, "cpu") == {"fast_path": True, "enforce_eager": True}
    assert engine_options(default_section, "cuda") == {"fast_path": True, "enforce_eager": False}
    chosen_section = config_of(
        "generation.engine.enforce_eager=true", "generation.engine.fast_path=off"
    ).generation.engine
    assert engine_options(chosen_section, "cuda") == {"fast_path": False, "enforce_eager": True}


def test_a_users_engine_has_its_options_and_their_defaults(home: Path) -> None:
    assert engine_options(config_of(NAME).generation.engine, "cpu") == {"attention": "sdpa"}
    chosen_section = config_of(NAME, "generation.engine.attention=eager").generation.engine
    assert engine_options(chosen_section, "cpu") == {"attention": "eager"}
    assert engine_rules(chosen_section).packages == ()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (
            [NAME, "generation.engine.fast_path=off"],
            "generation.engine.fast_path: unknown key here: a key of vllm; torch_engine.py:KIND has attention",
        ),
        ([NAME, "generation.engine.atention=sdpa"], "generation.engine.atention: unknown key; did you mean attention?"),
        (
            [NAME, "generation.engine.attention=flash"],
            "generation.engine.attention: must be one of eager, sdpa, not 'flash'",
        ),
        (["generation.engine=vlm"], "generation.engine.name: must be vllm or module:KIND, not vlm; did you mean vllm?"),
        (
            ["generation.fast_path=off"],
            "generation.fast_path: unknown key; generation.fast_path is now generation.engine.fast_path",
        ),
        (
            ["generation.enforce_eager=true"],
            "generation.enforce_eager: unknown key; generation.enforce_eager is now generation.engine.enforce_eager",
        ),
    ],
)
def test_a_wrong_key_is_answered_with_the_right_one(home: Path, overrides: list[str], expected: str) -> None:
    assert problems(*overrides) == [expected]


def test_an_object_that_is_no_engine_is_refused(home: Path) -> None:
    [problem] = problems(f"generation.engine={TORCH}:environment")
    assert problem.startswith(
        "generation.engine.name: must be an EngineKind, as generation/README.md has it, not <funct"
    )
