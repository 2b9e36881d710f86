"""Runs of an earlier version of rlctl: they are not resumed, but their weights are a model like any other."""

from pathlib import Path


def earlier_version(run: Path, sign: str) -> str:
    """Return the sentence for such a run. run: its directory; sign: what shows that it is one."""
    exports = [path.parent for path in run.glob("checkpoints/step_*/hf/config.json")]
    newest = max(exports, key=lambda path: (len(path.parent.name), path.parent.name), default=None)
    anew = f"from its weights, model.path={newest}" if newest else "in another run.dir: it has exported no weights"
    return (
        f"the run is of an earlier version of rlctl ({sign}), whose checkpoints this one does not resume; "
        f"to begin anew {anew}"
    )
