"""Fingerprint of a checkpoint's inputs: the model, tokenizer and data of the run that made the checkpoint.

The fingerprint is the entry `made_with` of the checkpoint's state. A resume with a config that contradicts it is
refused: the weights would not fit, or the cursor would count other rows, so that tasks would be lost or trained twice
(contract 2).
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlctl.config.run_weights import is_adapter, local_folder
from rlctl.config.schema import RunConfig
from rlctl.data.datasets import path_text
from rlctl.data.files import files_of
from rlctl.data.tasks import SupervisedSample, Task
from rlctl.models.adapter_folder import WEIGHTS
from rlctl.models.model_settings import settings_of
from rlctl.models.weight_headers import digest_of_weights
from rlctl.preflight.settled import Settled
from rlctl.preflight.written_roles import written_roles

_VOCABULARY = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
# Keys that determine the rows, their order and their text, apart from the data file's own bytes.
_DATASET_KEYS = [
    f"data.train.{name}" for name in ("prompt_key", "answer_key", "messages_key", "limit", "split", "args")
]
_DATA_KEYS = [
    "data.validation.fraction",
    "run.seed",
    "data.shuffle",
    "data.system_prompt",
    "data.chat_template",
    "data.chat_template_kwargs",
    "data.special_tokens",
    "data.max_prompt_length",
]


@dataclass(frozen=True)
class Contradiction:
    """A config value that does not fit a checkpoint."""

    key: str
    old: str
    new: str
    reason: str

    def __str__(self) -> str:
        return f"{self.old} -> {self.new}: {self.reason}"


def made_with(settled: Settled, model: Path | None) -> dict[str, Any]:
    """Return the fingerprint of a run's model, tokenizer and data. The digest of an input on another machine is None.

    model: Hugging Face folder of the model; None if it is not on this machine yet.
    """
    config = settled.config
    tokenizer = Path(config.model.tokenizer) if config.model.tokenizer else model
    train_paths = config.data.train.paths
    template = Path(config.data.chat_template)
    keys = {key: _config_value(config, key) for key in _DATA_KEYS + _DATASET_KEYS}
    if config.data.system_prompt is not None:
        # Only a digest, because the prompt may come from an environment variable, whose values are not written to disk.
        keys["data.system_prompt"] = f"sha256 {hashlib.sha256(config.data.system_prompt.encode()).hexdigest()[:12]}"
    if not config.data.shuffle:
        # Without shuffling the rows come in the order of the file, whatever the seed.
        keys["run.seed"] = None
    # `data.chat_template` is a template's text, or the path of a file with a template.
    if template.is_file():
        keys["data.chat_template"] = f"a file of sha256 {_digest(template)[:12]}"
    if sources := config.data.train.sources:
        keys["data.train.sources"] = {name: section.weight for name, section in sources.items()}
    if config.sft:
        keys |= {key: _config_value(config, key) for key in ("sft.mask", "sft.history", "model.max_length")}
    return {
        "model": settings_of(model) if model else None,
        "model_path": config.model.path,
        # Digest of weights that no checkpoint has. Earlier checkpoints have `weights` instead, a digest of the first
        # and last bytes of the files.
        "frozen": _weights_digest(settled, model),
        "roles": _roles(settled),
        "lora": _lora(config),
        "tokenizer": _vocabulary(tokenizer) if tokenizer else None,
        "tokenizer_path": config.model.tokenizer or config.model.path,
        "data": _digest_files(train_paths),
        "data_path": path_text(train_paths) if train_paths else None,
        "keys": keys,
    }


def digest_rows(rows: Sequence[Task] | Sequence[SupervisedSample]) -> str:
    """Return the digest of all tokenized rows of a data set."""
    digest = hashlib.sha256()
    for row in rows:
        target = row.answer if isinstance(row, Task) else row.mask.tobytes()
        digest.update(repr((len(row.tokens), target)).encode("utf-8", "surrogatepass"))
        digest.update(np.asarray(row.tokens, np.int32).tobytes())
        if isinstance(row, Task) and not row.tokens:
            # A task without a prompt, for example of an environment, is defined by its row.
            digest.update(json.dumps(row.row, sort_keys=True, default=str).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def contradictions(then: Mapping[str, Any], now: Mapping[str, Any], step: int) -> list[Contradiction]:
    """Return the values of `now` that do not fit the checkpoint of `step`. then, now: results of `made_with`."""
    return [*_models(then, now, step), *_data(then, now, step)]


def _models(then: Mapping[str, Any], now: Mapping[str, Any], step: int) -> Iterator[Contradiction]:
    """Yield the contradictions of model, adapters and tokenizer."""
    checkpoint = f"the checkpoint of step {step}"
    old_path = then["model_path"]
    new_path = now["model_path"]
    old_sizes = then["model"] or {}
    new_sizes = now["model"] or {}
    changes = []
    for key, old_size in old_sizes.items():
        if key in new_sizes and new_sizes[key] != old_size:
            changes.append(f"{key} {old_size} -> {new_sizes[key]}")
    if changes:
        reason = f"not the model of {checkpoint}: {', '.join(changes[:4])}"
        yield Contradiction("model.path", old_path, new_path, reason)
    elif _differ(then, now, "frozen"):
        # The model has the same shapes, but weights that no checkpoint saves are others.
        role = "base below the adapters" if now.get("lora") else "reference policy (grpo.loss.kl_coef above 0)"
        yield Contradiction("model.path", old_path, new_path, f"not the {role} of {checkpoint}")
    old_roles = then.get("roles") or {}
    for name, role in now["roles"].items():
        old_role = old_roles.get(name)
        if old_role and None not in (old_role["digest"], role["digest"]) and old_role["digest"] != role["digest"]:
            reason = f"not the weights of the {name} of {checkpoint}"
            yield Contradiction(f"{name}.path", old_role["path"], role["path"], reason)
    old_lora = then.get("lora")
    new_lora = now.get("lora")
    if old_lora != new_lora:
        reason = f"{checkpoint} holds the former"
        yield Contradiction("lora", setting_text(old_lora), setting_text(new_lora), reason)
    if _differ(then, now, "tokenizer"):
        key = "model.tokenizer" if now["tokenizer_path"] != now["model_path"] else "model.path"
        reason = f"another vocabulary than that of {checkpoint}: its tokens mean other text"
        yield Contradiction(key, then["tokenizer_path"], now["tokenizer_path"], reason)


def _data(then: Mapping[str, Any], now: Mapping[str, Any], step: int) -> Iterator[Contradiction]:
    """Yield the contradictions of data: other files, or keys that change the rows."""
    old_path = then["data_path"]
    new_path = now["data_path"]
    # Compare files by digest, because they may have been moved. Compare a hub data set by its name.
    has_digests = then["data"] and now["data"]
    is_other_data = then["data"] != now["data"] if has_digests else old_path != new_path
    if is_other_data:
        new_text = str(new_path) if old_path != new_path else "other content"
        reason = f"not the rows that the cursor of the checkpoint of step {step} counts"
        yield Contradiction("data.train.path", str(old_path), new_text, reason)
    for key, setting in then["keys"].items():
        if key in now["keys"] and now["keys"][key] != setting:
            reason = f"the order or text of the rows changes, and the checkpoint of step {step} counts on them"
            yield Contradiction(key, setting_text(setting), setting_text(now["keys"][key]), reason)


def _differ(then: Mapping[str, Any], now: Mapping[str, Any], key: str) -> bool:
    """Return True if both fingerprints have a digest `key`, and the digests differ."""
    return then.get(key) is not None and now[key] is not None and then[key] != now[key]


def setting_text(value: Any) -> str:
    """Return a config value as typed on a command line: null, true, false, a number or a text."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _config_value(config: RunConfig, key: str) -> Any:
    section: Any = config
    for name in key.split("."):
        section = getattr(section, name)
    return section


def _vocabulary(folder: Path) -> str | None:
    files = [folder / name for name in _VOCABULARY if (folder / name).is_file()]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() if files else None


def _weights_digest(settled: Settled, folder: Path | None) -> str | None:
    """Return the digest of the base weights of adapters, or of the reference policy's weights.

    Return None for a run with neither, because its checkpoints have all weights.
    """
    config = settled.config
    reads_first = settled.grpo is not None and settled.grpo.config.reference.path is None
    if config.lora is None and not (reads_first and "reference" in settled.frozen_roles):
        return None
    if config.model.random_init:
        return f"random, of seed {config.run.seed}"
    return digest_of_weights(folder) if folder else None


def _roles(settled: Settled) -> dict[str, Any]:
    """Return role -> path and digest of its weights, for each role that has a model of its own."""
    roles = {}
    for name, role in written_roles(settled.config).items():
        if name in settled.frozen_roles and role.weights is not None:
            folder = local_folder(role.weights)
            digest = None
            if folder is not None:
                digest = _digest(folder / WEIGHTS) if is_adapter(folder) else digest_of_weights(folder)
            roles[name] = {"path": role.weights, "digest": digest}
    return roles


def _lora(config: RunConfig) -> dict[str, Any] | None:
    """Return the config values that adapters depend on; None for a run without adapters."""
    section = config.lora
    return None if section is None else {key: getattr(section, key) for key in ("rank", "alpha", "rslora", "targets")}


def _digest_files(dataset: str | Sequence[str] | None) -> str | None:
    """Return the digest of a data set's files, in their order; None for a data set that does not consist of files."""
    files = [Path(file) for file in files_of(dataset or [])]
    if not files or not all(file.is_file() for file in files):
        return None
    digests = [_digest(file) for file in files]
    return digests[0] if len(files) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
