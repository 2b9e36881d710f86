"""A home with teachers, for the tests of roles."""

import json
import shutil
from pathlib import Path

from rlctl.models.model_sizes import read_sizes
from tests.unit import folders


def write_teachers(folder: Path) -> Path:
    """Make a home with two teachers and return it: `twin` has the model's architecture, `wide` another width."""
    home = folders.write(folder / "home")
    shutil.copytree(home / "model", home / "twin")
    shutil.copytree(home / "model", home / "wide")
    config = json.loads((home / "wide/config.json").read_text())
    (home / "wide/config.json").write_text(json.dumps({**config, "hidden_size": 128}))
    for name in ("model", "twin", "wide"):
        read_sizes(home / name / "config.json")
    return home
