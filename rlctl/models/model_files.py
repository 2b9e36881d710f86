"""Model folders on the driver, without torch: finding or downloading a run's model, and listing its end tokens."""

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError, first_line
from rlctl.config.json_files import read_object
from rlctl.config.run_weights import ADAPTER_CONFIG, chat_folder, local_adapter
from rlctl.config.schema import ModelSection
from rlctl.models.adapter_folder import base_digest, read_config, read_spec
from rlctl.models.adapters import AdapterSpec
from rlctl.models.facts import HeadKind, ModelFacts, find_facts, head_problem
from rlctl.models.model_sizes import check_config, read_sizes
from rlctl.models.weight_headers import check_weights, digest_of_weights
from rlctl.utils.process import run_module

_FETCHED_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True)
class ModelFiles:
    """Folder and facts of a run's model."""

    # Hugging Face folder on this machine.
    folder: str
    # Folder of the model without adapters, in the config or downloaded. It differs from `folder` with `random_init` and
    # after a merge, which write a new folder.
    source: str
    facts: ModelFacts
    # PEFT's adapter folder, if `model.path` is one; `folder` then has its base model. None for a model without adapter.
    adapter: str | None = None
    # Folder or hub name that names the model without adapters. After a merge it is the merged folder.
    base: str = ""

    @property
    def adapters(self) -> AdapterSpec | None:
        """Spec of the adapters in the folder `adapter`; None without one."""
        return read_spec(Path(self.adapter), self.facts.sizes.linears) if self.adapter else None

    @classmethod
    def prepare(
        cls,
        model: ModelSection,
        run_dir: Path,
        seed: int,
        merge: bool = False,
        base: str | None = None,
        head: HeadKind | None = "causal",
    ) -> "ModelFiles":
        """Make a model's folder ready on this machine, and return it with the model's facts.

        A hub model is downloaded once into the Hugging Face cache. For an adapter the base model is prepared too.
        merge: write an adapter's sum with its base into the run directory, and return this folder. base: an adapter's
        base model; None: the one that it names. With `random_init` a random model is written there, once for all
        attempts. head: the kind of head that is needed; None for any. Raises ModelError for a model that rlctl does not
        train, for another head, for quantised, truncated or missing weights, and for an adapter trained on other base
        weights.
        """
        adapter = _fetch_adapter(model.path)
        # Folder or hub name of the model without adapters.
        base = (base or read_config(adapter).base) if adapter else model.path
        if os.path.isdir(base):
            source = base
        else:
            # Fetch config.json first: two kilobytes show whether rlctl can train the model.
            read_sizes(_download(base, ["config.json"]) / "config.json")
            source = str(_download(base, _FETCHED_FILES))
        check_config(Path(source) / "config.json")
        if model.random_init:
            folder = str(run_dir / "init")
            _make_random(shape=source, folder=folder, seed=seed)
        else:
            check_weights(Path(source))
            folder = source
        facts = find_facts(Path(folder))
        if head and (problem := head_problem(Path(folder), head)):
            raise ModelError(problem)
        if adapter is None:
            return cls(folder, source, facts, base=base)
        check_base(adapter, Path(folder))
        files = cls(folder, source, facts, adapter=str(adapter), base=base)
        # Read the adapter's tensors too, which raises ModelError for an adapter that does not fit the base.
        assert files.adapters
        if not merge:
            return files
        merged = run_dir / "init"
        _make_folder(
            merged,
            failure=f"no merged model of {adapter}",
            module="rlctl.models.merge_adapter",
            arguments=[str(adapter), folder, str(merged)],
        )
        return cls(str(merged), source, find_facts(merged), base=str(merged))

    @property
    def chat(self) -> str:
        """Folder with tokenizer, chat template and end tokens."""
        return chat_folder(self.adapter or self.folder)

    @property
    def max_length(self) -> int:
        """Longest sequence of the model in tokens."""
        return self.facts.sizes.max_positions


def _fetch_adapter(name: str) -> Path | None:
    """Return the folder of an adapter, downloaded if it is on the hub; None if `name` is a whole model."""
    if os.path.isdir(name):
        return local_adapter(name)
    if not (_download(name, ["config.json", ADAPTER_CONFIG]) / ADAPTER_CONFIG).is_file():
        return None
    # A repository with both config files may be a model or an adapter. `local_adapter` decides by the weights.
    return local_adapter(str(_download(name, _FETCHED_FILES)))


def _download(name: str, patterns: list[str]) -> Path:
    """Download the files of a hub model that match `patterns`. Return its folder in the Hugging Face cache. Raises
    ModelError.
    """
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as error:  # errors of hub, network, disk, and a wrong name
        raise ModelError(f"{name}: no folder, and not to be had from the hub: {first_line(error)}") from error


def check_base(adapter: Path, base: Path) -> None:
    """Raise ModelError if rlctl trained the adapter on base weights that differ from the current ones."""
    digest = base_digest(adapter)
    if digest is not None and digest != digest_of_weights(base):
        raise ModelError(f"{adapter} was trained on other weights than {base} has now: it adapts those alone")


def _make_random(shape: str, folder: str, seed: int) -> None:
    _make_folder(
        Path(folder),
        failure=f"no random model in the shape of {shape}",
        module="rlctl.models.meta_model",
        arguments=[shape, folder, str(seed)],
    )


def make_value_folder(source: Path, folder: Path, seed: int) -> Path:
    """Write a model folder with the weights of `source` and a value head of zeros, unless it exists; return it.

    Raises ModelError.
    """
    try:
        _make_folder(
            folder,
            failure=f"no model with a value head of {source}",
            module="rlctl.models.value_folder",
            arguments=[str(source), str(folder), str(seed), "0"],
        )
    except RuntimeError as error:
        raise ModelError(str(error)) from error
    return folder


def _make_folder(folder: Path, *, failure: str, module: str, arguments: Sequence[str]) -> None:
    """Run a module that writes a model folder, unless the folder exists.

    The module runs in a separate process, because the driver imports no torch. arguments: the module's. failure: begin
    of the RuntimeError's message. Raises ModuleNotFoundError for a missing package.
    """
    if (folder / "config.json").exists():
        return
    process = run_module(module, *arguments)
    if process.returncode:
        lines = process.stderr.strip().splitlines()
        # The last line may be a warning or a line of the exception's message, so the exception's own line is better.
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        reason = (raised or lines or [f"exit code {process.returncode}"])[-1]
        raise RuntimeError(f"{failure}: {reason}")


def list_end_tokens(folder: Path, tokens: Iterable[int]) -> None:
    """Add `tokens` to eos_token_id in the generation_config.json of a Hugging Face folder.

    transformers and vLLM end an answer at the tokens listed there. If the file is missing, they read config.json, so a
    new file copies bos_token_id and pad_token_id from it. Nothing is written if all tokens are already listed. An
    adapter folder has no config.json.
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
        # With this key some versions of transformers ignore the file and read config.json.
        settings.pop("_from_model_config", None)
        file.write_text(json.dumps(settings, indent=2) + "\n")
