"""Model folders as the driver reads and completes them, without torch: sizes, files, the tokens that end an answer."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

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
        found = cls(folder, source, find_facts(Path(folder)), str(adapter) if adapter else None, base)
        if adapter is None:
            return found
        check_base(adapter, Path(folder))
        assert found.adapters
        if not merge:
            return found
        merged = run_dir / "init"
        own = str(adapter), folder, str(merged)
        _make_folder(merged, f"no merged model of {adapter}", "rlctl.models.merge_adapter", *own)
        return cls(str(merged), source, find_facts(merged), None, str(merged))

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
    # A repository of both is a model: that the weights tell.
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
    what = f"no random model in the shape of {shape}"
    _make_folder(Path(folder), what, "rlctl.models.meta_model", shape, folder, str(seed))


def _make_folder(folder: Path, what: str, module: str, *arguments: str) -> None:
    """Have a module write a model's folder in a separate process, once: the driver stays free of torch.

    what: the loss, for the message of the RuntimeError. Raises ModuleNotFoundError for a package that is not there.
    """
    if (folder / "config.json").exists():
        return
    made = run_module(module, *arguments)
    if made.returncode:
        lines = made.stderr.strip().splitlines()
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        reason = (raised or lines or [f"exit code {made.returncode}"])[-1]
        raise RuntimeError(f"{what}: {reason}")


def list_end_tokens(folder: Path, tokens: Iterable[int]) -> None:
    """Add `tokens` to eos_token_id in the generation_config.json of a Hugging Face folder.

    transformers and vLLM end an answer at the tokens listed there. Where the file is missing they read config.json
    instead, so a new file takes over its bos_token_id and pad_token_id. Nothing is written if all are listed already.
    An adapter's folder has no config.json.
    """
    file, own = folder / "generation_config.json", folder / "config.json"
    config = read_object(own) if own.is_file() else {}
    values = read_object(file) if file.is_file() else {}
    if not file.is_file():
        names = ("bos_token_id", "pad_token_id", "eos_token_id")
        values = {name: config[name] for name in names if config.get(name) is not None}
    listed = values.get("eos_token_id")
    ends = [each for each in (listed if isinstance(listed, list) else [listed]) if each is not None]
    if missing := [token for token in dict.fromkeys(tokens) if token not in ends]:
        values["eos_token_id"] = [*ends, *missing]
        # Some releases of transformers read config.json instead of a file that says so.
        values.pop("_from_model_config", None)
        file.write_text(json.dumps(values, indent=2) + "\n")
