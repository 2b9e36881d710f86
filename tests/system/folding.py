"""vLLM worker on a CPU that stores A below its layer's weight, as on a GPU. Importing this module switches it on."""

from rlctl.generation.vllm import adapter_loader
from rlctl.generation.vllm.worker_extension import RefitWorker

adapter_loader.folded_on.add("cpu")


class FoldingWorker(RefitWorker):
    """Worker that reports the methods by which its adapted layers compute."""

    def rl_methods(self) -> list[str]:
        modules = self.model_runner.get_model().modules()
        return sorted({type(module.quant_method).__name__ for module in modules if hasattr(module, "rl_lora_a")})
