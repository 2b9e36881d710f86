"""Versions of rlctl and of its required packages, and the message for runs of an earlier version.

rlctl's version and requirements come from its installed metadata, or from pyproject.toml in a source tree.
"""

import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def package_version(name: str) -> str:
    """Return the installed version of a package, empty when it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def installed_version() -> str | None:
    """Return rlctl's version as installed by pip; None in a source tree that is only on the Python path."""
    return package_version("rlctl") or None


def source_tree() -> Path | None:
    """Return the folder of the source tree that this code is run from; None if pip installed it."""
    return _PYPROJECT.parent if _project() else None


def own_version() -> str:
    """Return the version of the code that runs; `unknown` where neither metadata nor pyproject.toml has it."""
    return installed_version() or str(_project().get("version", "unknown"))


def requirements(extra: str | None = None) -> list[str]:
    """Return the requirements of an extra in pip's syntax, without markers. extra None: those of plain `rlctl`."""
    if installed_version() is None:
        project = _project()
        specs = project.get("optional-dependencies", {}).get(extra, []) if extra else project.get("dependencies", [])
        return [str(requirement) for requirement in specs]
    parts = (requirement.partition(";") for requirement in requires("rlctl") or [])
    if extra is None:
        return [spec.strip() for spec, _, marker in parts if not marker]
    return [spec.strip() for spec, _, marker in parts if f"'{extra}'" in marker.replace('"', "'")]


def _project() -> dict[str, Any]:
    if not _PYPROJECT.is_file():
        return {}
    project: dict[str, Any] = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    return project if project.get("name") == "rlctl" else {}


def earlier_version(run: Path, sign: str) -> str:
    """Return the message for a run of an earlier version, which cannot be resumed. A new run can start from its
    weights.

    run: the run's directory. sign: text that says how the earlier version is recognized.
    """
    exports = [path.parent for path in run.glob("checkpoints/step_*/hf/config.json")]
    # The longer of two names has the larger step: step_10 comes after step_9.
    newest = max(exports, key=lambda path: (len(path.parent.name), path.parent.name), default=None)
    anew = f"from its weights, model.path={newest}" if newest else "in another run.dir: it has exported no weights"
    return (
        f"the run is of an earlier version of rlctl ({sign}), whose checkpoints this one does not resume; "
        f"to begin anew {anew}"
    )
