"""Model folders as the driver reads and completes them, without torch: sizes, files, the tokens that end an answer."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError, first_line
from rlctl.config.json_files import read_object
from rlctl.config.run_weights import ADAPTER_CONFIG, chat_folder, local_adapter
from rlctl.config.schema import ModelSection
from rlctl.models.adapter_folder import base_digest, read_config, read_spec
from rlctl.models.adapters import AdapterSpec
from rlctl.models.facts import ModelFacts, find_facts
from rlctl.models.model_sizes import check_config, read_sizes
from rlctl.models.weight_headers import check_weights, digest_of_weights
from rlctl.utils.process import run_module

_FETCHED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True)
class ModelFiles:
    """Folder and facts of a run's model."""

    # Hugging Face folder on this machine.
    folder: str
    # Folder that the config names; another one than `folder` with `random_init`.
    source: str
    facts: ModelFacts
    # PEFT's folder that the config names, an adapter of the model in `folder`; None for a model without one.
    adapter: str | None = None
    # Folder or hub name of the model itself.
    base: str = ""

    @property
    def adapters(self) -> AdapterSpec | None:
        """Adapters of `adapter`."""
        return read_spec(Path(self.adapter), self.facts.sizes.linears) if self.adapter else None

    @classmethod
    def find(cls, model: ModelSection, run_dir: Path, seed: int, merge: bool = False) -> "ModelFiles":
        """Return the facts of a folder or hub name. A hub model is downloaded once into the Hugging Face cache.

        An adapter's folder is that adapter and its base; merge: a model of both, inside the run directory. With
        `random_init` the folder is made there too, once for all attempts. Raises ModelError for a model that rlctl does
        not train, for quantised, truncated or missing weights, and for an adapter of other weights.
        """
        adapter = _fetch_adapter(model.path)
        base = source = read_config(adapter).base if adapter else model.path
        if not os.path.isdir(source):
            # Two kilobytes say if the weights are worth fetching.
            read_sizes(_download(source, ["config.json"]) / "config.json")
            source = str(_download(source, _FETCHED_FILES))
        check_config(Path(source) / "config.json")
        folder = source
        if model.random_init:
            folder = str(run_dir / "init")
            _make_random(source, folder, seed)
        else:
            check_weights(Path(source))
        facts = find_facts(Path(folder))
        if adapter is None:
            return cls(folder, source, facts, base=base)
        files = cls(folder, source, facts, adapter=str(adapter), base=base)
        check_base(adapter, Path(folder))
        assert files.adapters
        if not merge:
            return files
        merged = run_dir / "init"
        arguments = (str(adapter), folder, str(merged))
        _make_folder(merged, f"no merged model of {adapter}", "rlctl.models.merge_adapter", *arguments)
        return cls(str(merged), source, find_facts(merged), base=str(merged))

    @property
    def chat(self) -> str:
        """Folder of tokenizer, chat template and end tokens."""
        return chat_folder(self.adapter or self.folder)

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens."""
        return self.facts.sizes.max_positions


def _fetch_adapter(name: str) -> Path | None:
    """Return the folder of an adapter, one of the hub downloaded; None for a whole model."""
    if os.path.isdir(name):
        return local_adapter(name)
    if not (_download(name, ["config.json", ADAPTER_CONFIG]) / ADAPTER_CONFIG).is_file():
        return None
    # A repository that has both files is a model where its weights are a model's: `local_adapter` looks at them.
    return local_adapter(str(_download(name, _FETCHED_FILES)))


def _download(name: str, patterns: list[str]) -> Path:
    """Return the folder of a hub model in the Hugging Face cache, with these files. Raises ModelError."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # errors of the hub, of the network, of the disk, and of the name
        raise ModelError(f"{name}: no folder, and not to be had from the hub: {first_line(error)}") from error


def check_base(adapter: Path, base: Path) -> None:
    """Raise ModelError if rlctl trained the adapter on other weights than the base has now."""
    digest = base_digest(adapter)
    if digest is not None and digest != digest_of_weights(base):
        raise ModelError(f"{adapter} was trained on other weights than {base} has now: it adapts those alone")


def _make_random(shape: str, folder: str, seed: int) -> None:
    failure = f"no random model in the shape of {shape}"
    _make_folder(Path(folder), failure, "rlctl.models.meta_model", shape, folder, str(seed))


def _make_folder(folder: Path, failure: str, module: str, *arguments: str) -> None:
    """Have a module write a model's folder in a separate process, once: the driver stays free of torch.

    failure: what is missing then, for the message of the RuntimeError. Raises ModuleNotFoundError for a missing
    package.
    """
    if (folder / "config.json").exists():
        return
    process = run_module(module, *arguments)
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        reason = (raised or lines or [f"exit code {process.returncode}"])[-1]
        raise RuntimeError(f"{failure}: {reason}")


def list_end_tokens(folder: Path, tokens: Iterable[int]) -> None:
    """Add `tokens` to eos_token_id in the generation_config.json of a Hugging Face folder.

    transformers and vLLM end an answer at the tokens listed there. Where the file is missing they read config.json
    instead, so a new file takes over its bos_token_id and pad_token_id. Nothing is written if all are listed already.
    An adapter's folder has no config.json.
    """
    file = folder / "generation_config.json"
    model_config = folder / "config.json"
    settings: dict[str, Any] = {}
    if file.is_file():
        settings = read_object(file)
    elif model_config.is_file():
        config = read_object(model_config)
        names = ("bos_token_id", "pad_token_id", "eos_token_id")
        settings = {name: config[name] for name in names if config.get(name) is not None}
    listed = settings.get("eos_token_id")
    if not isinstance(listed, list):
        listed = [listed]
    end_tokens = [token for token in listed if token is not None]
    missing = [token for token in dict.fromkeys(tokens) if token not in end_tokens]
    if missing:
        settings["eos_token_id"] = end_tokens + missing
        # With this key some releases of transformers read config.json instead of the file.
        settings.pop("_from_model_config", None)
        file.write_text(json.dumps(settings, indent=2) + "\n")
