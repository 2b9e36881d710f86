"""Model folders as the driver reads and completes them, without torch: sizes, files, the tokens that end an answer."""

import json
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlctl.config.schema import ModelSection
from rlctl.models.facts import ModelFacts, find_facts
from rlctl.models.model_sizes import check_config, read_sizes
from rlctl.models.weight_headers import check_weights

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True)
class ModelFiles:
    """Folder and facts of a run's model."""

    # Hugging Face folder on this machine.
    folder: str
    # Folder that the config names; another one than `folder` with `random_init`.
    source: str
    facts: ModelFacts

    @classmethod
    def find(cls, model: ModelSection, run_dir: Path, seed: int) -> "ModelFiles":
        """Return the facts of a folder or hub name. A hub model is downloaded once into the Hugging Face cache.

        With `random_init` the folder is made inside the run directory, once for all attempts. Raises ModelError for a
        model that rlctl does not train, and for quantised, truncated or missing weights.
        """
        source = model.path
        if not Path(source).is_dir():
            from huggingface_hub import snapshot_download

            # Two kilobytes say if the weights are worth fetching.
            read_sizes(Path(snapshot_download(source, allow_patterns=["config.json"])) / "config.json")
            source = str(snapshot_download(source, allow_patterns=_FILES))
        check_config(Path(source) / "config.json")
        folder = source
        if model.random_init:
            folder = str(run_dir / "init")
            _make_random(source, folder, seed)
        else:
            check_weights(Path(source))
        return cls(folder, source, find_facts(Path(folder)))

    @property
    def max_length(self) -> int:
        """Longest sequence in tokens."""
        return self.facts.sizes.max_positions


def _make_random(shape: str, folder: str, seed: int) -> None:
    if (Path(folder) / "config.json").exists():
        return
    # In a separate process: the driver stays free of torch.
    command = [sys.executable, "-m", "rlctl.models.meta_model", shape, folder, str(seed)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        lines = made.stderr.strip().splitlines()
        raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
        reason = (raised or lines or [f"exit code {made.returncode}"])[-1]
        raise RuntimeError(f"no random model in the shape of {shape}: {reason}")


def list_end_tokens(folder: Path, tokens: Iterable[int]) -> None:
    """Add `tokens` to eos_token_id in the generation_config.json of a Hugging Face folder.

    transformers and vLLM end an answer at the tokens listed there. Where the file is missing they read config.json
    instead, so a new file takes over its bos_token_id and pad_token_id. Nothing is written if all are listed already.
    An adapter's folder has no config.json.
    """
    file, own = folder / "generation_config.json", folder / "config.json"
    config = json.loads(own.read_text()) if own.is_file() else {}
    values: dict[str, Any] = json.loads(file.read_text()) if file.is_file() else {}
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
