"""Causal LMs made from a config.json alone: without weights, for their shape, or with random ones, as a folder.

`python -m rlctl.models.meta_model SHAPE FOLDER SEED [quick]` writes a random one. SHAPE is a Hugging Face folder; its
weights are not read. FOLDER appears whole or not at all. The same seed writes the same bytes.
"""

import os
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.dropout import _DropoutNd

from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object
from rlctl.models import grouped_experts, packed_attention
from rlctl.models.adapters import text_name
from rlctl.models.observed_facts import without_dropout, without_padding_warning
from rlctl.models.state_layers import install_restarts


def text_config(folder: Path) -> Any:
    """Return transformers' config of a folder's text model. Raises ModelError for a model type without a causal LM."""
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, __version__

    values = read_object(folder / "config.json")
    kind = values.get("model_type")
    if kind not in CONFIG_MAPPING:
        hint = ", and code of a model's folder (auto_map) is never run" if "auto_map" in values else ""
        raise ModelError(f"model_type {kind} in {folder}: transformers {__version__} does not know it{hint}")
    try:
        whole_config = AutoConfig.from_pretrained(folder)
        config = whole_config.get_text_config(decoder=True)
    except Exception as error:  # A config class has an error for each of its values.
        raise ModelError(f"{folder}/config.json: {reason(error)}") from error
    tied = getattr(whole_config, "tie_word_embeddings", None)
    if config is not whole_config and tied is not None:
        config.tie_word_embeddings = tied
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            f"model_type {config.model_type} in {folder}: transformers {__version__} has no causal language model of it"
        )
    return config


def whole_class(folder: Path) -> Any:
    """Return transformers' class of a folder that holds more than a text model; None for a text model."""
    import transformers

    whole_config = transformers.AutoConfig.from_pretrained(folder)
    if whole_config.get_text_config(decoder=True) is whole_config:
        return None
    return getattr(transformers, (whole_config.architectures or ("",))[0], None)


@cache
def text_in_whole(folder: Path, decoder: str) -> tuple[str, str]:
    """Return how the names of the text model's modules begin, alone and in the folder's own class.

    Both are empty for a text model. decoder: path of the text model's decoder, as in `ModelFacts`. Raises ModelError
    for a class that is unknown, cannot be built, or has other names than `text_name` knows.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if config.get_text_config(decoder=True) is config:
        return "", ""
    loss = "an adapter's export would have names that PEFT passes over"
    model_class = whole_class(folder)
    if model_class is None:
        raise ModelError(f"{folder}: transformers has no class of its architectures {config.architectures}: {loss}")
    decoder_class = type(causal_lm(folder).get_submodule(decoder))
    try:
        with torch.device("meta"):
            lm = model_class._from_config(config, dtype=torch.float32)
    except Exception as error:  # A model class has an error for each size that does not fit.
        raise ModelError(f"{folder}: transformers does not build {model_class.__name__}: {reason(error)}") from error
    paths = [name for name, module in lm.named_modules() if type(module) is decoder_class]
    if [text_name(f"{path}.") for path in paths] != [f"{decoder}."]:
        holders = ", ".join(paths) or "no module"
        problem = f"{model_class.__name__} holds its {decoder_class.__name__} as {holders}, no language_model"
        raise ModelError(f"{folder}: {problem}: {loss}")
    return f"{decoder}.", f"{paths[0]}."


def causal_lm(folder: Path, attention: str | None = None) -> Any:
    """Return the causal LM of a folder's text model on the meta device, without dropout.

    attention: name that transformers knows it by; None: transformers chooses among its own. Raises ModelError for a
    model type without one, or for dropout that stays.
    """
    from transformers import AutoModelForCausalLM

    config = text_config(folder)
    without_dropout(config)
    try:
        with torch.device("meta"):
            lm = AutoModelForCausalLM.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention,
                experts_implementation=grouped_experts.register(),
            )
    except Exception as error:  # A model class has an error for each size that does not fit.
        raise ModelError(f"{folder}: transformers does not build {config.model_type}: {reason(error)}") from error
    without_padding_warning(lm)
    dropouts = [name for name, module in lm.named_modules() if isinstance(module, _DropoutNd) and module.p]
    if dropouts:
        raise ModelError(f"{folder} has dropout at {dropouts[0]} that no key of its config.json turns off")
    return lm


def reason(error: Exception) -> str:
    """Return the kind of an error and its message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def skeleton(folder: Path, device: torch.device, packed: bool = True) -> Any:
    """Return the causal LM with its parameters on the meta device and its computed buffers on `device`.

    Its dropout is off. packed: its attention and states begin with each sequence of a pack; else they are transformers'
    own, for one sequence a row. Raises ModelError as `causal_lm`.
    """
    lm = causal_lm(folder, packed_attention.register() if packed else None)
    install_restarts(lm)
    compute_buffers(lm, device)
    return lm


def compute_buffers(lm: Any, device: torch.device) -> None:
    """Compute on `device` the buffers that no checkpoint holds: rotary tables, scales.

    transformers computes them by `_init_weights` too. It leaves marked tensors alone.
    """
    from transformers.initialization import guard_torch_init_functions

    for tensor in (*lm.parameters(), *lm.buffers()):
        tensor._is_hf_initialized = True
    for module in lm.modules():
        for name in module._non_persistent_buffers_set:
            if (buffer := module._buffers[name]) is not None:
                module._buffers[name] = torch.empty_like(buffer, device=device)
    with torch.no_grad(), guard_torch_init_functions():
        # Some modules compute the buffers of their children.
        lm.apply(lm._init_weights)


def write_random_model(shape: Path, folder: Path, seed: int, quick: bool = False) -> None:
    """Write a model with float32 weights as transformers draws them for the architecture (initializer_range).

    quick: draws bfloat16 on a GPU where there is one. A CPU takes minutes for 4 billion numbers.
    """
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
