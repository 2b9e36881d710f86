"""Language models built from a config.json alone: on the meta device, or as a folder with random weights.

`python -m rlctl.models.meta_model SHAPE FOLDER SEED [quick]` writes a random model. SHAPE is a Hugging Face folder; its
weights are not read. FOLDER is renamed into place at the end, so it is never incomplete. The same seed writes the same
bytes.
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
from rlctl.models.facts import head_kind
from rlctl.models.observed_facts import turn_off_dropout, turn_off_padding_warning
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
    except Exception as error:  # Config classes raise any type of error for bad values.
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
    """Return transformers' class for the whole model of a folder, for example a vision-language model; None for a text
    model.
    """
    import transformers

    whole_config = transformers.AutoConfig.from_pretrained(folder)
    if whole_config.get_text_config(decoder=True) is whole_config:
        return None
    return getattr(transformers, (whole_config.architectures or ("",))[0], None)


@cache
def text_in_whole(folder: Path, decoder: str) -> tuple[str, str]:
    """Return the prefix of the text model's module names, in the text model itself and in the folder's whole model.

    Both are empty if the folder is a pure text model. decoder: path of the text model's decoder, as in `ModelFacts`.
    Raises ModelError for a class that is unknown, cannot be built, or has module names that `text_name` does not
    handle.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    if config.get_text_config(decoder=True) is config:
        return "", ""
    loss = "an adapter's export would have names that PEFT passes over"
    model_class = whole_class(folder)
    if model_class is None:
        raise ModelError(f"{folder}: transformers has no class of its architectures {config.architectures}: {loss}")
    decoder_class = type(language_model(folder).get_submodule(decoder))
    try:
        with torch.device("meta"):
            lm = model_class._from_config(config, dtype=torch.float32)
    except Exception as error:  # Model classes raise any type of error for bad sizes.
        raise ModelError(f"{folder}: transformers does not build {model_class.__name__}: {reason(error)}") from error
    paths = [name for name, module in lm.named_modules() if type(module) is decoder_class]
    if [text_name(f"{path}.") for path in paths] != [f"{decoder}."]:
        holders = ", ".join(paths) or "no module"
        problem = f"{model_class.__name__} holds its {decoder_class.__name__} as {holders}, no language_model"
        raise ModelError(f"{folder}: {problem}: {loss}")
    return f"{decoder}.", f"{paths[0]}."


def language_model(folder: Path, attention: str | None = None) -> Any:
    """Build a folder's text model with its head on the meta device, with dropout off.

    The head is that of a causal LM, or a value head if the folder's architectures name a classifier with one label.
    attention: name registered with transformers; None: transformers chooses. Raises ModelError for a model type without
    a causal LM, without the classifier, or for dropout that no config key turns off.
    """
    config = text_config(folder)
    turn_off_dropout(config)
    model_class: Any = _model_class(folder, config)
    try:
        with torch.device("meta"):
            lm = model_class.from_config(
                config,
                dtype=torch.float32,
                attn_implementation=attention,
                experts_implementation=grouped_experts.register(),
            )
    except Exception as error:  # Model classes raise any type of error for bad sizes.
        raise ModelError(f"{folder}: transformers does not build {config.model_type}: {reason(error)}") from error
    turn_off_padding_warning(lm)
    dropouts = [name for name, module in lm.named_modules() if isinstance(module, _DropoutNd) and module.p]
    if dropouts:
        raise ModelError(f"{folder} has dropout at {dropouts[0]} that no key of its config.json turns off")
    return lm


def _model_class(folder: Path, config: Any) -> Any:
    """Return transformers' automatic class that builds the text model. Sets `config` to one label for a value head."""
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

    if head_kind(folder) == "causal":
        return AutoModelForCausalLM
    _set_one_label(config)
    names = " ".join(read_object(folder / "config.json")["architectures"])
    return AutoModelForTokenClassification if "ForToken" in names else AutoModelForSequenceClassification


def decoder_of(lm: Any, folder: Path) -> torch.nn.Module:
    """Return the module that turns tokens into hidden states. Raises ModelError."""
    decoder = lm.get_decoder()
    if decoder is lm:
        # The class has a wrong base_model_prefix (llama4_text). The decoder is the child with the embedding.
        embedding = lm.get_input_embeddings()
        owners = [child for child in lm.children() if any(module is embedding for module in child.modules())]
        if len(owners) != 1:
            raise ModelError(f"{folder}: transformers' {type(lm).__name__} names no decoder")
        decoder = owners[0]
    assert isinstance(decoder, torch.nn.Module)
    return decoder


def value_head(lm: Any) -> torch.nn.Linear:
    """Return the linear layer with one output that a classifier has besides its decoder. Raises ModelError."""
    heads = [child for child in lm.children() if isinstance(child, torch.nn.Linear) and child.out_features == 1]
    if len(heads) != 1:
        name = type(lm).__name__
        raise ModelError(f"transformers' {name} has {len(heads)} linear layers with one output; needed: one")
    return heads[0]


def token_classifier(config: Any, folder: Path) -> Any:
    """Build transformers' token classifier with one label for a text model's config, on the meta device.

    Sets `config` to one label. folder: for messages. Raises ModelError for a model type without token classifier.
    """
    from transformers import AutoModelForTokenClassification, __version__

    if type(config) not in AutoModelForTokenClassification._model_mapping:
        raise ModelError(f"{folder}: transformers {__version__} has no token classifier of {config.model_type}")
    turn_off_dropout(config)
    _set_one_label(config)
    with torch.device("meta"):
        return AutoModelForTokenClassification.from_config(
            config, dtype=torch.float32, experts_implementation=grouped_experts.register()
        )


def _set_one_label(config: Any) -> None:
    """Set a transformers config to one label, and the dropout before a token classifier's head to 0."""
    config.num_labels = 1
    # Without this key transformers' class has a dropout of 0.1.
    config.classifier_dropout = 0.0


def reason(error: Exception) -> str:
    """Return an error's class name and message in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def skeleton(folder: Path, device: torch.device, packed: bool = True) -> Any:
    """Build `language_model` with parameters on the meta device and computed buffers on `device`.

    packed: attention and states restart at each sequence of a pack; else they are transformers' own, for one sequence
    per row. Raises ModelError as `language_model`.
    """
    lm = language_model(folder, packed_attention.register() if packed else None)
    install_restarts(lm)
    compute_buffers(lm, device)
    return lm


def compute_buffers(lm: Any, device: torch.device) -> None:
    """Compute on `device` the buffers that are not in checkpoints: rotary tables, scales.

    transformers' `_init_weights` computes them. It skips parameters and buffers that are marked as initialized.
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
    """Write a model with random float32 weights, drawn by transformers for the architecture (initializer_range).

    quick: draw bfloat16 weights on a GPU if there is one. A CPU takes minutes for 4 billion numbers.
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
