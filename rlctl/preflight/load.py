"""Loading of configs. `load` composes, types and checks a config, and raises all of its problems at once."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, Literal, TypeVar, overload

from rlctl.config.builtin import CONFIGS, find_recipe
from rlctl.config.compose import compose
from rlctl.config.convert import Converter
from rlctl.config.errors import ConfigError, Problem
from rlctl.config.fields import FURTHER, key_of, keys_of
from rlctl.config.provenance import ConfigNode, Interpolation, Origin, dump, leaves, read_toml, show_path
from rlctl.config.recorded_origins import recorded_origins, with_origins
from rlctl.config.run_weights import local_folder
from rlctl.config.schema import KINDS, RunConfig
from rlctl.models.facts import ModelSizes
from rlctl.models.model_sizes import config_file
from rlctl.preflight.check_model import live_run_note
from rlctl.preflight.check_roles import settle_here
from rlctl.preflight.checks import check
from rlctl.preflight.notes import notes
from rlctl.preflight.settled import Settled, SettledGrpo, SettledSft
from rlctl.preflight.version import earlier_version

Kind = TypeVar("Kind", bound=Settled, covariant=True)
_INHERIT = "inherit it, `defaults: grpo.yaml` or `defaults: sft.yaml`"
# Sections in which other tools configure rollouts.
_PEERS_THAT_SAMPLE = {"orchestrator", "actor_rollout_ref"}
TINY = {"grpo": "grpo-tiny", "sft": "sft-tiny"}


class OtherVersionError(ConfigError):
    """Another version of rlctl wrote the config.yaml of a run. The message is for a user who resumes the run."""

    def __init__(self, file: Path, sign: str) -> None:
        # Text that says how the other version is recognized, for example a missing key.
        self.sign = sign
        super().__init__([Problem(show_path(file), "", earlier_version(Path(show_path(file.parent)), sign))])


@dataclass(frozen=True)
class Composed(Generic[Kind]):
    """A config that passed all checks, with the origins of its values."""

    # Settled without a machine: values that depend on a device are not known yet.
    settled: Kind
    # File that the config was loaded from.
    recipe: Path
    # Dotted key -> place where its value was written.
    origins: dict[str, Origin]
    # Notes for the user, one line each, for example about an override without effect. They do not stop the run.
    notes: list[str]
    # Dotted key -> text of the `${oc.env:...}` that gave the value.
    secrets: dict[str, str]
    # Dotted key -> origin, as the config.yaml of a resumed run has it; empty for a new run.
    recorded: dict[str, str]

    @property
    def config(self) -> RunConfig:
        """The config."""
        return self.settled.config

    def to_yaml(self) -> str:
        """Return the resolved config as YAML. It can be run again: it has no `defaults:`, and its paths are absolute.

        A `${...}` that reads the environment stays as text: no secret is written to disk. A comment after each value
        that is no default says where it was written.
        """
        return with_origins(dump(self.written(Interpolation)), self._origins_to_record())

    def written(self, kind: type[str] = str) -> dict[str, Any]:
        """Return `values()`, with each reference to the environment as its text `${oc.env:...}`. kind: class of that
        text.
        """
        values = self.values()
        for key, text in self.secrets.items():
            *names, last = key.split(".")
            parent = _get(values, names)
            parent[int(last) if isinstance(parent, list) else last] = kind(text)
        return values

    def variables(self) -> list[str]:
        """Return the names of the environment variables that the config reads."""
        names: set[str] = set()
        for text in self.secrets.values():
            names.update(re.findall(r"oc\.env:\s*(\w+)", text))
        return sorted(names)

    def _origins_to_record(self) -> dict[str, str]:
        """Return dotted key -> origin of each value that is no default.

        A value that a resumed run keeps has its recorded origin.
        """
        kept_keys = {key for key, origin in self.origins.items() if self.recorded and origin.file == self.recipe}
        kept_origins = {key: text for key, text in self.recorded.items() if key in kept_keys}
        written = {
            key: str(origin)
            for key, origin in self.origins.items()
            if key not in kept_keys and (origin.override or (origin.file and not origin.file.is_relative_to(CONFIGS)))
        }
        return kept_origins | written

    def values(self) -> dict[str, Any]:
        """Return the resolved config as plain dicts and lists, with the keys of the YAML file."""
        return asdict(self.config, dict_factory=_by_key)


@overload
def load(
    kind: Literal["grpo"],
    recipe: str | None,
    overrides: list[str],
    *,
    resume: bool = False,
    away: bool = False,
    within: str = "",
    command_overrides: Sequence[str] = (),
) -> Composed[SettledGrpo]: ...
@overload
def load(
    kind: Literal["sft"], recipe: str | None, overrides: list[str], *, resume: bool = False, away: bool = False
) -> Composed[SettledSft]: ...
@overload
def load(
    kind: str | None,
    recipe: str | None,
    overrides: list[str],
    *,
    resume: bool = False,
    away: bool = False,
    within: str = "",
    command_overrides: Sequence[str] = (),
) -> Composed[Settled]: ...
def load(
    kind: str | None,
    recipe: str | None,
    overrides: list[str],
    *,
    resume: bool = False,
    away: bool = False,
    within: str = "",
    command_overrides: Sequence[str] = (),
) -> Composed[Any]:
    """Load the config of a run. kind: "grpo" or "sft"; None: the recipe's. recipe: file or name; None: the tiny recipe.

    resume: the run's directory may exist. away: the run will be on another machine, where other absolute paths exist.
    within: see `compose`. command_overrides: overrides that the command itself adds, applied before the user's.

    Raises ConfigError with every problem at once.
    """
    file = find_recipe(recipe or TINY[kind or "grpo"])
    checked = _check(
        kind, file, overrides, resume, away, is_of_run=resume, within=within, command_overrides=command_overrides
    )
    if checked.problems:
        raise ConfigError(checked.problems)
    settled = checked.settled
    lines = list(checked.notes)
    lines += [f"{node.origin}: {node.note}" for node in checked.nodes.values() if node.note]
    if not away:
        lines += _notes_of_model(settled.config.model.path, settled.facts)
    lines += notes(settled, checked.origins)
    prefix = f"{within}." if within else ""
    recorded = recorded_origins(file) if resume else {}
    recorded = {key.removeprefix(prefix): text for key, text in recorded.items() if key.startswith(prefix)}
    composed = Composed(settled, recipe=file, origins=checked.origins, notes=lines, secrets={}, recorded=recorded)
    values = composed.values()
    # A value that was changed after interpolation is no secret here. An example is a relative path, which was made
    # absolute: its text would mean another path from the run's folder.
    unchanged = {
        key: node.secret
        for key, node in checked.nodes.items()
        if node.secret and _get(values, key.split(".")) == node.value
    }
    return replace(composed, secrets=unchanged)


def _notes_of_model(path: str, facts: ModelSizes | None) -> Iterator[str]:
    """Yield a note if the model's sizes are not known, and one if a live run may delete the model's folder."""
    if facts is None and config_file(path) is not None:
        message = "its sizes are not known yet, and not checked; rlctl train derives them before it starts"
        yield f"model.path={path}: {message}"
    elif facts is None and local_folder(path) is None:
        message = "not on this machine, its sizes are not known, and not checked; rlctl train fetches it"
        yield f"model.path={path}: {message}"
    live = live_run_note(path)
    if live:
        yield live


def draft(kind: str | None, recipe: str, overrides: list[str]) -> tuple[ConfigNode, list[Problem]]:
    """Return the composed config as a tree for display, and its problems. Raises ConfigError if composing fails."""
    checked = _check(kind, find_recipe(recipe), overrides, run_may_exist=True)
    return checked.root, checked.problems


def problems_of_text(text: str) -> list[Problem]:
    """Return the problems of a recipe that is given as text. They name its location `draft`."""
    with TemporaryDirectory() as folder:
        file = Path(folder).resolve() / "draft.yaml"
        file.write_text(text, encoding="utf-8")
        problems = problems_of_file(file)
        return [replace(problem, where=problem.where.replace(str(file), "draft")) for problem in problems]


def problems_of_file(file: Path) -> list[Problem]:
    """Return the problems of the recipe in `file`."""
    try:
        return draft(None, str(file), [])[1]
    except ConfigError as error:
        return error.problems


@dataclass(frozen=True)
class _CheckedConfig:
    """A composed config and its problems."""

    root: ConfigNode
    # Dotted key -> node of each value.
    nodes: dict[str, ConfigNode]
    origins: dict[str, Origin]
    # Wrong values are BROKEN.
    settled: Settled
    problems: list[Problem]
    notes: list[str]


def _check(
    kind: str | None,
    file: Path,
    overrides: list[str],
    run_may_exist: bool,
    away: bool = False,
    is_of_run: bool = False,
    within: str = "",
    command_overrides: Sequence[str] = (),
) -> _CheckedConfig:
    """Compose and type a config, settle it, and run every check.

    run_may_exist: the directory of the config's run may exist. is_of_run: `file` is the config.yaml of a run.
    """
    if file.suffix == ".toml":
        message = "is TOML; a config is YAML and inherits its kind, `defaults: grpo.yaml` or `defaults: sft.yaml`"
        raise ConfigError(_other_tools_problems(kind, file, read_toml(file), message))
    root = compose(file, overrides, within, command_overrides)
    assert isinstance(root.value, dict)
    kind_node = root.value.get("kind")
    if kind_node is None or not isinstance(kind_node.value, str) or kind_node.value not in KINDS:
        message = f"must be one of {', '.join(KINDS)}: {_INHERIT}"
        if kind_node is None:
            raise ConfigError(_other_tools_problems(kind, file, root, message, "kind"))
        raise ConfigError([Problem(str(kind_node.origin), "kind", message)])
    if kind not in (None, kind_node.value):
        message = f"this is a recipe for {kind_node.value}; use `rlctl train {kind_node.value}`"
        raise ConfigError([Problem(str(kind_node.origin), "kind", message)])
    converter: Converter[Any] = Converter(KINDS[kind_node.value], show_path(file), away=away)
    config: RunConfig = converter.convert(root)
    # rlctl wrote this config with every key. A missing or unknown key means that another version wrote it.
    if is_of_run and converter.missing:
        raise OtherVersionError(file, f"its config has no {', '.join(converter.missing[:3])}")
    if is_of_run and (unknown := [key for key, node in converter.unknown if node.origin.file == file]):
        raise OtherVersionError(file, f"its config has {', '.join(unknown[:3])}, which this version has not")
    nodes = dict(leaves(root))
    origins = {key: node.origin for key, node in nodes.items()}
    settled = settle_here(config)
    problems = converter.problems + check(settled, origins, resume=run_may_exist, away=away)
    return _CheckedConfig(
        root=root, nodes=nodes, origins=origins, settled=settled, problems=problems, notes=converter.notes
    )


def _other_tools_problems(kind: str | None, file: Path, root: ConfigNode, message: str, key: str = "") -> list[Problem]:
    """Return a problem of a whole file, and a problem for each of its unknown keys with the nearest key of rlctl.

    The keys are looked up for a run of `kind`. None: sft if the file has `data` and no section that samples, else grpo.
    """
    names = set(root.value) if isinstance(root.value, dict) else set()
    sections_that_sample = set(keys_of(KINDS["grpo"])) - set(keys_of(KINDS["sft"])) | _PEERS_THAT_SAMPLE
    guess = "sft" if "data" in names and not sections_that_sample & names else "grpo"
    converter: Converter[Any] = Converter(KINDS[kind or guess], show_path(file))
    converter.convert(root)
    unknown = [problem for problem in converter.problems if problem.what.startswith("unknown ")]
    return [Problem(show_path(file), key, message), *unknown]


def _by_key(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = {key_of(name): value for name, value in pairs}
    further = values.pop(FURTHER, {})
    return {**values, **further}


def _get(values: Any, names: list[str]) -> Any:
    for name in names:
        values = values[int(name)] if isinstance(values, list) else values[name]
    return values
