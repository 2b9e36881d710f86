"""Workers of vLLM that count or fail. Engines alone import this file, by its name: it imports vLLM, 8 s of CPU."""

from typing import Any

from rlctl.generation.vllm.adapter_layers import Slice
from rlctl.generation.vllm.adapter_loader import find_adapters
from rlctl.generation.vllm.worker_extension import RefitWorker, return_errors
from rlctl.refit.protocol import Header


class CountingWorker(RefitWorker):
    """Keeps, at every change of weights, the length of each running rollout as vLLM's own model runner has it."""

    model_runner: Any
    _counts: list[dict[str, int]] | None = None

    def rl_commit(self, header: Header) -> None:
        """Note the length of each running rollout, then make the weights live."""
        running = self.model_runner.requests.items()
        self._counts = [*(self._counts or []), {name.rsplit("-", 1)[0]: len(r.output_token_ids) for name, r in running}]
        return super().rl_commit(header)

    def rl_counts(self) -> list[dict[str, int]]:
        """One mapping a commit."""
        return self._counts or []


class ForgettingWorker(RefitWorker):
    """Loses its weights and its keys and values when it is told to, as a GPU's does that sleeps without a copy."""

    def rl_forget(self) -> None:
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.fill_(float("nan"))
        for cache in self.model_runner.kv_caches:
            cache.fill_(1000.0)


class FaultyWorker(RefitWorker):
    """Delivers nothing, or adds its adapters a second time, when it is told to."""

    _lazy = False
    _proof: Any = None

    def rl_be_lazy(self) -> None:
        """Go on with the adapters and the proof of the version before."""
        self._lazy = True

    def rl_commit(self, header: Header) -> Any:
        return None if self._lazy else super().rl_commit(header)

    def rl_prove(self, header: Header) -> Any:
        if not self._lazy:
            self._proof = super().rl_prove(header)
        return self._proof

    @return_errors
    def rl_adapt_again(self) -> None:
        """Install the adapters once more: each would count twice."""
        model = self.model_runner.get_model()
        adapters = find_adapters(model)
        assert adapters
        name = next(iter(adapters.buffers)).rpartition(".")[0]
        target = adapters.spec.targets[0]
        adapters.install(model, [(name, Slice(target.name, (0, target.outputs), (0, target.inputs), 0))])
