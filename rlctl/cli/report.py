"""Output of `rlctl runs report`: one HTML page, and pictures of its charts."""

import time
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from rlctl.cli.output import busy, say
from rlctl.config.errors import ConfigError, Problem
from rlctl.dashboard.report import vega
from rlctl.dashboard.report.page import page
from rlctl.dashboard.report.pictures import pictures
from rlctl.dashboard.report.source import ReportedRun, read_runs
from rlctl.utils.files import write_whole


def write_report(folders: Sequence[Path], output: Path | None, png: Path | None, open_it: bool) -> None:
    """Write the report of the runs in these directories.

    output: the page; None: in the first run's directory. png: folder for pictures of the charts; None: no pictures.
    Raises ConfigError if vl-convert-python is missing, or if a file cannot be written.
    """
    if not vega.is_installed():
        raise ConfigError([Problem("runs report", "", "needs vl-convert-python: pip install 'rlctl[report]'")])
    runs = read_runs(folders)
    path = output or folders[0] / ("report.html" if len(runs) == 1 else f"report--{folders[1].resolve().name}.html")
    with busy("drawing"):
        try:
            write_whole(path, page(runs, time.strftime("written on %Y-%m-%d at %H:%M")))
            picture_files = _write_pictures(runs, png) if png else []
        except OSError as error:
            failed_file = Path(error.filename or path)
            is_picture = png is not None and failed_file.is_relative_to(png)
            remedy = "--png names another folder" if is_picture else "--output names another file"
            mistake = f"cannot be written: {error.strerror or error}; {remedy}"
            raise ConfigError([Problem(str(failed_file), "", mistake)]) from error
    for run in runs:
        for remark in run.remarks:
            say(f"note: {run.name} {remark}", err=True)
    say(f"{path} ({path.stat().st_size / 1e6:.1f} MB)")
    for file in picture_files:
        say(str(file))
    if open_it and not webbrowser.open(path.resolve().as_uri()):
        say("note: no browser was found here: copy the file, it is whole", err=True)


def _write_pictures(runs: Sequence[ReportedRun], folder: Path) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for name, picture in pictures(runs):
        file = folder / f"{name}.png"
        write_whole(file, picture)
        files.append(file)
    return files
