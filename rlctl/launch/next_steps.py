"""Commands that a run proposes at its end: to look at the run, to use and evaluate its weights, to continue it."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote

from rlctl.config.errors import ConfigError, ModelError
from rlctl.config.run_weights import base_of, is_adapter
from rlctl.config.telemetry_schema import (
    MlflowSection,
    SwanlabSection,
    TensorBoardSection,
    TrackerSection,
    TrackioSection,
    WandbSection,
)
from rlctl.models.adapter_folder import read_config
from rlctl.preflight.engines.vllm import lora_options
from rlctl.preflight.load import load
from rlctl.preflight.placement import ResourceRequest, requested_resources
from rlctl.preflight.settled import Settled
from rlctl.run.checkpoints import Checkpoints
from rlctl.run.run_dir import JobRecord, RunDir, RunDirError
from rlctl.telemetry.jsonl import read_records


def next_commands(
    settled: Settled,
    run_dir: RunDir,
    status: str,
    smaller: Sequence[ResourceRequest] = (),
    fails_again: bool = False,
) -> list[str]:
    """Return the commands to propose after a run with this `status`, the most useful one first.

    smaller: after a loss of nodes, run sizes that fit the remaining nodes, the largest first. fails_again: True if a
    resumed run would fail in the same way.
    """
    config = settled.config
    try:
        record = JobRecord.read(run_dir.path)
    except RunDirError:
        # The record was damaged during the run.
        record = None
    cluster_option = f" --cluster {record.cluster}" if record else ""
    run_name = quote(record.called if record and record.called else str(run_dir.path))
    resume = f"rlctl train {config.kind} --resume {run_name}{cluster_option}"
    if status == "failed":
        logs = f"rlctl runs logs {run_name}"
        if fails_again:
            return [logs]
        return [" ".join([resume, *_shrink(settled, run_dir, smaller)]), logs]
    if status != "done":
        return [resume]
    steps = config.num_steps
    if not any(record.get("step") == steps for record in read_records(run_dir.metrics)):
        # A run that only probes ends before its steps.
        return [resume]
    # The files of a run on a cluster are not on this machine.
    is_local = record is None or not (record.remote or record.called)
    commands = [f"rlctl runs dash {run_name}"]
    if is_local:
        commands += _commands_on_files(settled, run_dir, run_name)
    return [*commands, f"{resume} {config.kind}.num_steps={2 * steps}"]


def _shrink(settled: Settled, run_dir: RunDir, smaller: Sequence[ResourceRequest]) -> list[str]:
    """Return the overrides for the largest size in `smaller` that passes the checks; none for the full size."""
    config = settled.config
    request = requested_resources(settled)
    for share in smaller:
        overrides = []
        if share.ranks != request.ranks:
            overrides.append(f"trainer.num_ranks={share.ranks}")
        if share.engines != request.engines:
            overrides.append(f"generation.num_engines={share.engines}")
        if overrides and config.trainer.replicas not in ("auto", 1):
            overrides.append("trainer.replicas=auto")
        with suppress(ConfigError):
            # The full size has no overrides, and passed the checks when this run started.
            if overrides:
                load(config.kind, str(run_dir.config), overrides, resume=True)
            return overrides
    return []


def _commands_on_files(settled: Settled, run_dir: RunDir, run_name: str) -> Iterator[str]:
    """Yield commands that use the best checkpoint (the newest, if none was measured) or open a tracker's files."""
    checkpoints = Checkpoints(run_dir.checkpoints, keep_last=1, keep_best=0)
    newest = checkpoints.latest()
    chosen = checkpoints.best() or newest
    if newest and chosen and chosen.export.is_dir():
        # Without --step a command uses the run's newest checkpoint.
        step_option = "" if chosen.step == newest.step else f" --step {chosen.step}"
        sampling = settled.sampling
        if sampling is None or sampling.config.data.has_validation:
            yield f"rlctl eval {run_name}{'' if sampling else ' RECIPE'}{step_option}"
        if settled.sft:
            yield f"rlctl train grpo RECIPE model.path={quote(str(chosen.path)) if step_option else run_name}"
        if is_adapter(chosen.export):
            # No command is proposed for a damaged adapter.
            with suppress(ModelError):
                options = lora_options(read_config(chosen.export).rank)
                yield f"rlctl export {run_name} {quote(f'{run_dir.name}-hf')} --merged{step_option}"
                module = quote(f"{run_dir.name}={chosen.export}")
                yield f"vllm serve {quote(base_of(chosen.export))} {options} --lora-modules {module}"
        else:
            yield f"rlctl export {run_name} {quote(f'{run_dir.name}-hf')}{step_option}"
            yield f"vllm serve {quote(str(chosen.export))}"
    for section in settled.config.telemetry.trackers:
        yield from _tracker_commands(section, run_dir.path)


def _tracker_commands(section: TrackerSection, run: Path) -> Iterator[str]:
    """Yield the command of a tracker's own program that shows or uploads the run."""
    match section:
        case TensorBoardSection():
            yield f"tensorboard --logdir {quote(str(run / 'tensorboard'))}"
        case MlflowSection(uri=None) if (run / "mlflow.db").exists():
            yield f"mlflow ui --backend-store-uri {quote(f'sqlite:///{run.resolve()}/mlflow.db')}"
        case TrackioSection(space=None, project=project):
            yield f"trackio show --project {quote(project)}"
        case SwanlabSection(mode="offline"):
            for folder in sorted((run / "swanlab").glob("run-*"))[-1:]:
                yield f"swanlab sync {quote(str(folder))}"
        case WandbSection():
            for folder in sorted((run / "wandb").glob("offline-run-*"))[-1:]:
                yield f"wandb sync {quote(str(folder))}"
