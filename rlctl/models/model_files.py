"""What the driver must know of a model before anything heavy starts: where its files are, and a few of its facts."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rlctl.config.schema import ModelSection
from rlctl.models.model_sizes import read_sizes
from rlctl.models.weight_headers import check_weights

_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]


@dataclass(frozen=True)
class ModelFiles:
    """folder: a Hugging Face folder on this machine. max_length: tokens.

    source: the folder that the config names, another one with `random_init`. hidden: heads times their size.
    """

    folder: str
    source: str
    max_length: int
    layers: int
    hidden: int

    @classmethod
    def find(cls, model: ModelSection, run_dir: Path, seed: int) -> "ModelFiles":
        """Facts of a folder or hub name; a hub model is downloaded once into the Hugging Face cache.

        With `random_init` the folder is made anew inside the run directory, once for all attempts. Raises ModelError
        for a model that rlctl does not train, and for weights that are quantised, cut short or missing.
        """
        source = model.path if Path(model.path).is_dir() else _download(model.path)
        sizes = read_sizes(Path(source) / "config.json")
        if not model.random_init:
            check_weights(Path(source))
        folder = _random(source, run_dir / "init", seed) if model.random_init else source
        return cls(folder, source, sizes.max_positions, sizes.layers, sizes.heads * sizes.head_dim)


def _random(shape: str, folder: Path, seed: int) -> str:
    # In a process of its own: the driver stays free of torch.
    if not (folder / "config.json").exists():
        command = [sys.executable, "-m", "rlctl.models.meta_model", shape, str(folder), str(seed)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            raise RuntimeError(f"no random model in the shape of {shape}: {_reason(made)}")
    return str(folder)


def _reason(ended: subprocess.CompletedProcess[str]) -> str:
    lines = ended.stderr.strip().splitlines()
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exception): ", line)]
    return (raised or lines or [f"exit code {ended.returncode}"])[-1]


def _download(name: str) -> str:
    from huggingface_hub import snapshot_download

    # Two kilobytes say whether the weights are worth fetching.
    read_sizes(Path(snapshot_download(name, allow_patterns=["config.json"])) / "config.json")
    return str(snapshot_download(name, allow_patterns=_FILES))
