"""The commands that a run proposes at its end, one a line: look, use the weights, measure, go on."""

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
    """Return the commands after a run with this `status`, the most useful first, to go on last.

    smaller: after a loss of nodes, the run as it fits those that are left, the largest first. fails_again: a
    resumed run would end in the same way.
    """
    config = settled.config
    try:
        record = JobRecord.read(run_dir.path)
    except RunDirError:
        # It was damaged while the run lasted.
        record = None
    there = f" --cluster {record.cluster}" if record else ""
    known = quote(record.called if record and record.called else str(run_dir.path))
    resume = f"rlctl train {config.kind} --resume {known}{there}"
    if status == "failed":
        logs = f"rlctl runs logs {known}"
        if fails_again:
            return [logs]
        return [" ".join([resume, *_fewer(settled, run_dir, smaller)]), logs]
    if status != "done":
        return [resume]
    steps = config.num_steps
    if not any(record.get("step") == steps for record in read_records(run_dir.metrics)):
        # A probe: it ends before the steps that are left.
        return [resume]
    # Files of a run on a cluster cannot be read from here.
    here = [] if record and (record.remote or record.called) else list(_with_files(settled, run_dir, known))
    return [f"rlctl runs dash {known}", *here, f"{resume} {config.kind}.num_steps={2 * steps}"]


def _fewer(settled: Settled, run_dir: RunDir, smaller: Sequence[ResourceRequest]) -> list[str]:
    """Return the overrides of the largest run among `smaller` that its checks admit; none for the whole run."""
    config, whole = settled.config, requested_resources(settled)
    for share in smaller:
        changed = [f"trainer.num_ranks={share.ranks}"] * (share.ranks != whole.ranks)
        changed += [f"generation.num_engines={share.engines}"] * (share.engines != whole.engines)
        if changed and config.trainer.replicas not in ("auto", 1):
            changed.append("trainer.replicas=auto")
        with suppress(ConfigError):
            if changed:
                load(config.kind, str(run_dir.config), changed, resume=True)
            return changed
    return []


def _with_files(settled: Settled, run_dir: RunDir, known: str) -> Iterator[str]:
    """Yield commands that use the best checkpoint, the newest where none was measured, or read a tracker's files."""
    checkpoints = Checkpoints(run_dir.checkpoints, 1, 0)
    newest = checkpoints.latest()
    chosen = checkpoints.best() or newest
    if newest and chosen and chosen.export.is_dir():
        # A run's name alone is its newest checkpoint.
        step, sampling = f" --step {chosen.step}" * (chosen.step != newest.step), settled.sampling
        if sampling is None or sampling.config.data.has_validation:
            yield f"rlctl eval {known}{'' if sampling else ' RECIPE'}{step}"
        if settled.sft:
            yield f"rlctl train grpo RECIPE model.path={quote(str(chosen.path)) if step else known}"
        if is_adapter(chosen.export):
            # One that was damaged meanwhile is not offered.
            with suppress(ModelError):
                options = lora_options(read_config(chosen.export).rank)
                yield f"rlctl export {known} {quote(f'{run_dir.name}-hf')} --merged{step}"
                named = quote(f"{run_dir.name}={chosen.export}")
                yield f"vllm serve {quote(base_of(chosen.export))} {options} --lora-modules {named}"
        else:
            yield f"rlctl export {known} {quote(f'{run_dir.name}-hf')}{step}"
            yield f"vllm serve {quote(str(chosen.export))}"
    for section in settled.config.telemetry.trackers:
        yield from _of_tracker(section, run_dir.path)


def _of_tracker(section: TrackerSection, run: Path) -> Iterator[str]:
    """Yield the command by which a tracker's own program shows or sends a run."""
    match section:
        case TensorBoardSection():
            yield f"tensorboard --logdir {quote(str(run / 'tensorboard'))}"
        case MlflowSection(uri=None) if (run / "mlflow.db").exists():
            yield f"mlflow ui --backend-store-uri {quote(f'sqlite:///{run.resolve()}/mlflow.db')}"
        case TrackioSection(space=None, project=project):
            yield f"trackio show --project {quote(project)}"
        case SwanlabSection(mode="offline"):
            yield from (f"swanlab sync {quote(str(each))}" for each in sorted((run / "swanlab").glob("run-*"))[-1:])
        case WandbSection():
            yield from (f"wandb sync {quote(str(each))}" for each in sorted((run / "wandb").glob("offline-run-*"))[-1:])
