"""vLLM workers that count or fail. Only engines import this module, by name, since vLLM's import takes 8 s of CPU."""

from typing import Any

from rlctl.generation.vllm.adapter_layers import Slice
from rlctl.generation.vllm.adapter_loader import find_adapters
from rlctl.generation.vllm.worker_extension import RefitWorker, return_errors
from rlctl.refit.protocol import Header


class CountingWorker(RefitWorker):
    """Records at every change of weights the length of each running rollout, as vLLM's model runner has it."""

    model_runner: Any
    _counts: list[dict[str, int]] | None = None

    def rl_commit(self, header: Header) -> None:
        """Record the length of each running rollout, then make the new weights live."""
        running = self.model_runner.requests.items()
        self._counts = [*(self._counts or []), {name.rsplit("-", 1)[0]: len(r.output_token_ids) for name, r in running}]
        return super().rl_commit(header)

    def rl_counts(self) -> list[dict[str, int]]:
        """Return the recorded lengths: for each commit, request -> length."""
        return self._counts or []


class ForgettingWorker(RefitWorker):
    """Loses its weights and its KV cache on request, like a worker on a GPU that sleeps without a copy."""

    def rl_forget(self) -> None:
        for parameter in self.model_runner.get_model().parameters():
            parameter.data.fill_(float("nan"))
        for cache in self.model_runner.kv_caches:
            cache.fill_(1000.0)


class FaultyWorker(RefitWorker):
    """On request, skips a refit of adapters or installs adapters a second time."""

    _lazy = False
    _proof: Any = None

    def rl_be_lazy(self) -> None:
        """Keep the adapters of the version before, and report their proof, at the next refit."""
        self._lazy = True

    def rl_commit(self, header: Header) -> Any:
        return None if self._lazy else super().rl_commit(header)

    def rl_prove(self, header: Header) -> Any:
        if not self._lazy:
            self._proof = super().rl_prove(header)
        return self._proof

    @return_errors
    def rl_adapt_again(self) -> None:
        """Install the adapters a second time, so that each is added twice."""
        model = self.model_runner.get_model()
        adapters = find_adapters(model)
        assert adapters
        name = next(iter(adapters.buffers)).rpartition(".")[0]
        target = adapters.spec.targets[0]
        adapters.install(model, [(name, Slice(target.name, (0, target.outputs), (0, target.inputs), 0))])
