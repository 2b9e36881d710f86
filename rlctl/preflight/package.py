"""rlctl's own version and the versions that it asks for: from its metadata, or from pyproject.toml in a source tree."""

import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

_PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"


def installed_version() -> str | None:
    """Version that pip installed; None in a source tree that is only on the Python path."""
    try:
        return version("rlctl")
    except PackageNotFoundError:
        return None


def own_version() -> str:
    """Version of the code that runs; `unknown` where neither metadata nor pyproject.toml tells."""
    return installed_version() or str(_project().get("version", "unknown"))


def requirements(extra: str) -> list[str]:
    """What an extra asks for, as pip takes it, without markers."""
    if installed_version() is None:
        return [str(each) for each in _project().get("optional-dependencies", {}).get(extra, [])]
    parts = (each.partition(";") for each in requires("rlctl") or [])
    return [spec.strip() for spec, _, marker in parts if f"'{extra}'" in marker.replace('"', "'")]


def _project() -> dict[str, Any]:
    if not _PYPROJECT.is_file():
        return {}
    project: dict[str, Any] = tomllib.loads(_PYPROJECT.read_text(encoding="utf-8")).get("project", {})
    return project if project.get("name") == "rlctl" else {}
