"""Schema of telemetry: trackers, the dashboard, and recorded rollouts."""

# ruff: noqa: RUF009  (spec() makes a field, not a default)

from dataclasses import dataclass
from typing import Any, Literal

from rlctl.config.fields import spec


@dataclass
class TensorBoardSection:
    name: Literal["tensorboard"] = spec("Event files in the run directory.")


@dataclass
class WandbSection:
    name: Literal["wandb"] = spec("Weights & Biases.")
    project: str = spec("The project there, for example {name: wandb, project: arithmetic}.")
    entity: str | None = spec("The user or team that the project is of. null is the user's default there.")
    group: str | None = spec("The group that the run is shown in. null is none.")
    tags: list[str] = spec("The run's tags.")
    mode: Literal["online", "offline", "disabled"] | None = spec(
        "If it sends to Weights & Biases (online), writes into the run directory, to be sent later by `wandb sync` "
        "(offline), or does nothing (disabled). null is WANDB_MODE, or else online."
    )
    id: str | None = spec(
        "The id of the run there. A run of that id is continued, as it is after a resume. null is the run's name."
    )


@dataclass
class MlflowSection:
    name: Literal["mlflow"] = spec("MLflow: its own server, or a folder or database.")
    experiment: str = spec("The experiment that the run is of. It is made if there is none.")
    uri: str | None = spec(
        "The server or the place of the records, such as http://host:5000 or sqlite:///mlflow.db. null is "
        "MLFLOW_TRACKING_URI, or else mlflow.db in the run directory."
    )


@dataclass
class TrackioSection:
    name: Literal["trackio"] = spec("Trackio: a local database, which `trackio show` shows, or a Hugging Face Space.")
    project: str = spec("The project.")
    space: str | None = spec("The Space that it is shown in, as user/name. null stays on this machine.")


@dataclass
class SwanlabSection:
    name: Literal["swanlab"] = spec("SwanLab.")
    project: str = spec("The project.")
    mode: Literal["online", "offline"] = spec(
        "If it sends to SwanLab (online), or writes into the run directory, to be sent later by `swanlab sync`."
    )


@dataclass
class UserTrackerSection:
    name: str = spec(
        "tensorboard, wandb, mlflow, trackio, swanlab, or a class: module:Class or file.py:Class. The class is called "
        "with the run directory, the config and the further keys of its entry.",
        path="plugin",
    )
    further: dict[str, Any] = spec("The arguments of the class.")


TrackerSection = (
    TensorBoardSection | WandbSection | MlflowSection | TrackioSection | SwanlabSection | UserTrackerSection
)


@dataclass
class TelemetrySection:
    dashboard: Literal["auto", "on", "off"] = spec("auto is a live view on a terminal, and a line a step elsewhere.")
    trackers: list[TrackerSection] = spec(
        "Trackers that get the numbers of metrics.jsonl too, and the recorded groups as text."
    )
    groups_per_step: int = spec(
        "The groups of each step that are written to rollouts.jsonl, whole: every rollout of a prompt.", ge=0
    )
    groups_per_validation: int = spec(
        "The held-out prompts of each validation whose answers are written to rollouts.jsonl, the first ones.", ge=0
    )
    record_tokens: bool = spec(
        "The recorded groups have their token ids too, each with its log-prob, weight version and if it was sampled: "
        "about 7.5 bytes a sampled token. `rlctl runs rollouts --tokens` shows them."
    )
    rollouts_limit_mib: int = spec(
        "The most that the groups in rollouts.jsonl take, in MiB. Above it those of every second step are left out.",
        ge=1,
        most=1 << 20,
    )
    profile_updates: list[int] | None = spec(
        "Profile the trainer in these updates after the start, [first, last], into profile/. null profiles none.", ge=1
    )
