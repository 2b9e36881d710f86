"""A model with random weights in the shape of another.

`python -m rlctl.models.random_init SHAPE FOLDER SEED [quick]`: SHAPE is a Hugging Face folder of which only
config.json and the tokenizer are read. FOLDER appears whole or not at all; the same seed writes the same bytes.
"""

import os
import shutil
import sys
from pathlib import Path


def write_random_model(shape: Path, folder: Path, seed: int, quick: bool = False) -> None:
    """Weights as transformers draws them for the architecture (initializer_range), float32.

    quick: by a GPU and as bfloat16 where there is one; a CPU draws 4 billion numbers in minutes.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    on_gpu = quick and torch.cuda.is_available()
    with torch.device("cuda" if on_gpu else "cpu"):
        dtype = torch.bfloat16 if on_gpu else torch.float32
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(shape), dtype=dtype)
    temporary = folder.with_name(f".{folder.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    model.save_pretrained(temporary)
    for file in shape.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and not (temporary / file.name).exists():
            shutil.copy(file, temporary / file.name)
    os.replace(temporary, folder)


if __name__ == "__main__":
    write_random_model(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), "quick" in sys.argv[4:])
