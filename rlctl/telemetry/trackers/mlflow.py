"""Tracker MLflow: one MLflow run for each run directory, on a server, in a database or in the run directory."""

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from rlctl.telemetry.jsonl import Record
from rlctl.telemetry.trackers.text import as_text, flat

# MLflow refuses parameters with longer values, and calls with more parameters.
_LONGEST_VALUE = 6000
_MOST_PARAMS = 100
_TAG = "rlctl.run"


class MLflow:
    """One MLflow run for each run directory; a resumed run continues it.

    The groups of each step are an artifact: a text file.
    """

    def __init__(self, run: Path, config: Mapping[str, Any], experiment: str, uri: str | None) -> None:
        run = run.resolve()
        uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(uri or f"sqlite:///{run / 'mlflow.db'}")
        existing = self._client.get_experiment_by_name(experiment)
        if existing is None:
            # A server or a database has its own place for artifacts.
            artifacts = None if uri else (run / "mlflow-artifacts").as_uri()
            experiment_id = self._client.create_experiment(experiment, artifact_location=artifacts)
        else:
            experiment_id = existing.experiment_id
        self._run = self._find_run(experiment_id, str(run)) or self._create_run(experiment_id, run, config)

    def write(self, kind: str, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(
            self._run, [Metric(name, float(value), now, step) for name, value in metrics.items()], synchronous=True
        )

    def samples(self, purpose: str, step: int, groups: Sequence[Record]) -> None:
        self._client.log_text(self._run, as_text(groups), f"rollouts/{purpose}_{step:06}.txt")

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _find_run(self, experiment_id: str, run: str) -> str | None:
        """Return the id of the MLflow run that an earlier attempt of this run created; None if there is none."""
        # MLflow cannot search for a path with a quote in it. Each attempt of such a run creates a new MLflow run.
        if "'" in run:
            return None
        runs = self._client.search_runs([experiment_id], f"tags.`{_TAG}` = '{run}'", max_results=1)
        if not runs:
            return None
        self._client.update_run(runs[0].info.run_id, status="RUNNING")
        return str(runs[0].info.run_id)

    def _create_run(self, experiment_id: str, run: Path, config: Mapping[str, Any]) -> str:
        created = self._client.create_run(experiment_id, run_name=run.name, tags={_TAG: str(run)})
        run_id = str(created.info.run_id)
        params = [Param(key, str(value)[:_LONGEST_VALUE]) for key, value in flat(config)]
        for start in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[start : start + _MOST_PARAMS])
        return run_id
