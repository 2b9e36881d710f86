"""Export of weights: writes a Hugging Face folder in a given dtype with a model card, and uploads it to the hub."""

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from rlctl.config.errors import UserError, first_line
from rlctl.config.run_weights import is_adapter, local_folder
from rlctl.dashboard.formats import count
from rlctl.data.datasets import path_text
from rlctl.data.templates import write_arguments
from rlctl.evaluation.store import MADE_AGAIN, DamagedResult, EvaluationFolder
from rlctl.evaluation.target import Target
from rlctl.models.adapter_folder import WEIGHTS, AdapterConfig, read_config
from rlctl.models.merge_adapter import write_merged
from rlctl.models.model_files import check_base
from rlctl.models.weight_headers import DTYPES, file_header
from rlctl.run.run_dir import RunDir, model_name
from rlctl.telemetry.jsonl import read_records

ExportDtype = Literal["float32", "bfloat16", "float16"]
# Bits of a number's significand in each dtype.
_DIGITS = {"float32": 24, "float16": 11, "bfloat16": 8}


class ExportError(UserError):
    """An export that cannot be written."""


class PushError(ExportError):
    """An export that was written, but could not be uploaded."""

    exit_code = 1


def export(
    target: Target, to: Path, dtype: ExportDtype | None, warn: Callable[[str], None], merged: bool = False
) -> Path:
    """Write the target's weights and model card into the new folder `to`, whole or not at all; return it.

    dtype: dtype of floating-point tensors; None keeps their dtypes. warn: called with one line if a wider dtype adds no
    digits, and for each damaged evaluation. merged: add an adapter to its base in float32, then cast once. Raises
    ExportError, ModelError.
    """
    if to.exists():
        raise ExportError(f"{to} exists: name a folder that does not")
    source = local_folder(target.model)
    if source is None:
        rule = "only a checkpoint, a run, a folder, or a hub's model that was fetched before is exported"
        raise ExportError(f"{target.model} is not on this machine: {rule}")
    if merged and not is_adapter(source):
        raise ExportError(f"--merged: {source} is no adapter, it holds all weights")
    if dtype and is_adapter(source) and not merged:
        raise ExportError(f"--dtype {dtype}: an adapter stays as it is; add --merged for a whole model in {dtype}")
    temporary = to.with_name(f".{to.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    if merged:
        write = _write_merged
    else:
        write = _copy_adapter if is_adapter(source) else _write_weights
    try:
        dtypes = write(source, temporary, dtype, warn)
        if target.run is not None:
            _write_arguments(temporary, RunDir(target.run).recorded_config().get("data") or {}, warn)
        adapter = read_config(temporary) if is_adapter(temporary) else None
        (temporary / "README.md").write_text(model_card(target, dtypes, warn, adapter))
        temporary.replace(to)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            # Name the new folder: the error of a copy would name the file that is read.
            raise OSError(error.errno, error.strerror, str(to)) from error
        if isinstance(error, OSError):
            raise _explain_error(error, source, to) from error
        raise
    return to


def _write_arguments(folder: Path, data: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    """Write the run's arguments of the chat template into the exported template, as defaults.

    Call `warn` if the template is not exported.
    """
    arguments = data.get("chat_template_kwargs")
    if not arguments:
        return
    if data["chat_template"] == "auto":
        write_arguments(folder, arguments)
        return
    finding = f"data.chat_template_kwargs={json.dumps(arguments)} belongs to {data['chat_template']}"
    warn(f"{finding}, which is not exported: name both where the model is served")


def _explain_error(error: OSError, source: Path, to: Path) -> ExportError:
    """Return an error with the name of the unreadable file, or of the folder that cannot be written."""
    file = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else to
    if file.is_relative_to(source):
        return ExportError(f"{file} cannot be read: {error.strerror}")
    return ExportError(f"{to} cannot be written: {error.strerror or error}")


def _copy_adapter(source: Path, folder: Path, dtype: ExportDtype | None, warn: Callable[[str], None]) -> list[str]:
    # Raises ModelError for an adapter that rlctl cannot read.
    read_config(source)
    # Not `copytree`, whose error hides the system's error number.
    for file in [source, *sorted(source.rglob("*"))]:
        copy = folder / file.relative_to(source)
        if file.is_dir():
            copy.mkdir(parents=True)
        else:
            shutil.copyfile(file, copy)
    tensors = file_header(source / WEIGHTS).values()
    return sorted({DTYPES.get(tensor["dtype"], tensor["dtype"]) for tensor in tensors})


def _write_merged(source: Path, folder: Path, dtype: ExportDtype | None, warn: Callable[[str], None]) -> list[str]:
    base_name = read_config(source).base
    base = local_folder(base_name)
    if base is None:
        raise ExportError(f"{source}: its base {base_name} is not on this machine, and --merged adds to its weights")
    check_base(source, base)
    return write_merged(base, source, folder, dtype)


def _write_weights(source: Path, folder: Path, dtype: ExportDtype | None, warn: Callable[[str], None]) -> list[str]:
    from rlctl.models.hf_folder import WeightFiles, write_folder

    files = WeightFiles(source)
    layout = [(name, files.shape(name), _new_dtype(files.kind(name), dtype)) for name in files.names()]
    # Floating-point tensors come first, because config.json states the dtype of the first tensor.
    layout.sort(key=lambda row: row[2] not in _DIGITS)
    source_dtypes = {files.kind(name) for name in files.names()} & set(_DIGITS)
    if dtype and source_dtypes and max(_DIGITS[kind] for kind in source_dtypes) < _DIGITS[dtype]:
        warn(f"{source} is {', '.join(sorted(source_dtypes))}: as {dtype} it takes more bytes and has no more digits")
    write_folder(source, folder, layout, _cast_tensors(files, layout))
    return sorted({kind for _, _, kind in layout})


def push(folder: Path, repository: str, private: bool) -> str:
    """Upload the folder to `repository` (owner/name) of the hub, and return the repository's address.

    huggingface_hub chooses the hub (HF_ENDPOINT) and the login (`hf auth login`). Raises PushError with the reason if
    the hub cannot be reached, or the login is missing or may not write.
    """
    from huggingface_hub import HfApi

    try:
        hub = HfApi()
        address = hub.create_repo(repository, private=private, exist_ok=True)
        hub.upload_folder(folder_path=str(folder), repo_id=repository, commit_message="Export of rlctl")
    except Exception as error:  # Network, login, rights, names: huggingface_hub's errors have no common class.
        raise PushError(f"{folder} is written, but not pushed to {repository}: {first_line(error)}") from error
    return str(address)


def model_card(
    target: Target, dtypes: list[str], warn: Callable[[str], None], adapter: AdapterConfig | None = None
) -> str:
    """Return the README.md of an exported folder: the origin of the weights, the data, and the measured figures.

    dtypes: dtypes of the weights. warn: called with one line for each damaged evaluation, which is left out. adapter:
    config of the adapter if the folder is one.
    """
    # Data at the beginning of README.md, which the hub reads.
    head: dict[str, Any] = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["rlctl"]}
    config = RunDir(target.run).recorded_config() if target.run else {}
    if config:
        head["tags"].append(config["kind"])
        base = str(config["model"]["path"])
        # An absolute path has no meaning on the hub.
        head |= {} if Path(base).is_absolute() or config["model"].get("random_init") else {"base_model": base}
    weights = "Weights"
    if adapter:
        # With this name the hub's page shows how PEFT loads the adapter.
        head |= {"library_name": "peft", "tags": [*head["tags"], "lora"]}
        head |= {} if Path(adapter.base).is_absolute() else {"base_model": adapter.base}
        weights = f"LoRA adapter of rank {adapter.rank} for {model_name(adapter.base)},"
    parts = [f"---\n{yaml.safe_dump(head, sort_keys=False)}---", f"# {target.name}"]
    parts.append(f"{weights} in {', '.join(dtypes)}.")
    if target.run and config:
        start = "random weights in the shape of " if config["model"].get("random_init") else ""
        start += model_name(config["model"]["path"])
        parts.append(f"Trained by rlctl ({config['kind']}) from {start}, {target.step} steps.")
        parts += ["## Data", _list_data(config), "## Figures", *_figure_tables(target, target.run, warn)]
        recipe = yaml.safe_dump(_shareable(config), sort_keys=False).strip()
        parts += ["## Recipe", "Paths are shortened to their last part.", f"```yaml\n{recipe}\n```"]
    return "\n\n".join(parts) + "\n"


def _shareable(value: Any) -> Any:
    """Return a config without the parts that hold on one machine only: the run, its folders, and absolute paths."""
    if isinstance(value, dict):
        return {key: _shareable(child) for key, child in value.items() if key not in ("run", "telemetry", "placement")}
    if isinstance(value, list):
        return [_shareable(child) for child in value]
    return model_name(value) if isinstance(value, str) and value.startswith("/") else value


def _list_data(config: Mapping[str, Any]) -> str:
    """Return one line for each data set of a run, and one line for its rewards."""
    lines = []
    for name in ("train", "validation"):
        section = config["data"].get(name) or {}
        if path := section.get("path"):
            limit = f", the first {section['limit']} rows" if section.get("limit") else ""
            lines.append(f"- {name}: `{Path(path_text(path)).name}`{limit}")
        for source, facts in (section.get("sources") or {}).items():
            lines.append(f"- {name}, {source}: `{Path(path_text(facts['path'])).name}`, weight {facts['weight']:g}")
    rewards = config.get("rewards", [])
    if rewards:
        names = [f"`{Path(reward['name']).name}` (weight {reward['weight']:g})" for reward in rewards]
        lines.append(f"- rewards: {', '.join(names)}")
    return "\n".join(lines)


def _figure_tables(target: Target, run: Path, warn: Callable[[str], None]) -> Iterator[str]:
    """Yield Markdown tables of the run's validation at the weights' step, and of each evaluation of the weights."""
    records = read_records(RunDir(run).metrics)
    validation: Mapping[str, Any] = {}
    for record in records:
        if record.get("step") == target.step and record["kind"] == "validation":
            validation = record
    metrics = {name: value for name, value in validation.items() if "validation/" in name}
    rows = [f"| {name} | {value:.6g} |" for name, value in metrics.items() if "time/" not in name]
    yield "\n".join(["| the run's own validation | |", "| --- | --- |", *rows]) if rows else "The run did not validate."
    for folder in sorted((run / "evals").glob(f"step_{target.step}--*")):
        try:
            result = EvaluationFolder(folder).result()
        except DamagedResult as error:
            warn(f"{error}; README.md leaves its figures out; {MADE_AGAIN}")
            continue
        if result and "accuracy" in result["figures"]:
            yield _evaluation_table(result)


def _evaluation_table(result: Mapping[str, Any]) -> str:
    """Return a Markdown table of an evaluation's accuracy, and of its pass@k if there are several answers to a task."""
    figures = result["figures"]
    how = f"temperature {result['temperature']:g}" if result["temperature"] else "greedy"
    title = f"{result['data']}: {figures['tasks']} tasks, {count(result['generations'], 'answer')} each, {how}"
    estimates = {"accuracy": figures["accuracy"]}
    if result["generations"] > 1:
        estimates |= {f"pass@{size}": estimate for size, estimate in figures["pass_at"].items()}
    rows = [
        f"| {name} | {estimate['value']:.1%} | {_interval_text(estimate)} |" for name, estimate in estimates.items()
    ]
    return "\n".join([f"| {title} | | 95% |", "| --- | --- | --- |", *rows])


def _interval_text(estimate: Mapping[str, Any]) -> str:
    return estimate["note"] if estimate["low"] is None else f"{estimate['low']:.1%} to {estimate['high']:.1%}"


def _new_dtype(kind: str, dtype: str | None) -> str:
    return dtype if dtype and kind in _DIGITS else kind


def _cast_tensors(files: Any, layout: list[tuple[str, tuple[int, ...], str]]) -> Iterator[tuple[str, Any]]:
    import torch

    for name, _, kind in layout:
        yield name, files.tensor(name).to(getattr(torch, kind))
