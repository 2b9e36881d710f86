"""A worker of vLLM on a CPU with A below its layer's weight, as on a GPU: importing this module makes it so."""

from rlctl.generation.vllm import adapter_loader
from rlctl.generation.vllm.worker_extension import RefitWorker

adapter_loader.folded_on.add("cpu")


class FoldingWorker(RefitWorker):
    """Says by which methods its adapted layers compute."""

    def rl_methods(self) -> list[str]:
        modules = self.model_runner.get_model().modules()
        return sorted({type(module.quant_method).__name__ for module in modules if hasattr(module, "rl_lora_a")})
