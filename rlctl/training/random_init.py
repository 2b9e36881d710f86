"""A model with random weights in the shape of another: `python -m rlctl.training.random_init SHAPE FOLDER SEED`.

SHAPE is a Hugging Face folder of which only config.json and the tokenizer are read. FOLDER appears whole or not
at all; the same seed writes the same bytes.
"""

import os
import shutil
import sys
from pathlib import Path


def write_random_model(shape: Path, folder: Path, seed: int) -> None:
    """Weights as transformers draws them for the architecture (initializer_range), float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=torch.float32)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    for file in shape.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not (temporary / file.name).exists():
            shutil.copy(file, temporary / file.name)
    os.replace(temporary, folder)


if __name__ == "__main__":
    write_random_model(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
