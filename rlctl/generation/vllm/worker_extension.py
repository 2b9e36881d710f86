"""rlctl's extension of a vLLM worker: receives new weights, and reports memory and checksums.

vLLM mixes the class into its own worker, so its methods have the prefix `rl_`.
"""

from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from importlib import import_module
from typing import Any, TypeVar, cast

import torch

from rlctl.generation.requests import ScoreRequest
from rlctl.generation.vllm.adapter_loader import find_adapters
from rlctl.generation.vllm.adapter_refit import AdapterLoader
from rlctl.generation.vllm.param_layout import UnsupportedLayout, find_regions, live_tensors
from rlctl.generation.vllm.scores import ScoreTable, TokenScores, watch_steps
from rlctl.generation.vllm.weight_loader import WeightLoader, WeightReceiver, choose_loading
from rlctl.refit.checksum import ChecksumTable, lay
from rlctl.refit.param_slices import ParamSlice
from rlctl.refit.protocol import Header, LiveProof, LoadMode, Mode, ReceiveReport, TransportSpec
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.transport import open_receiver, receiver_bytes
from rlctl.utils.ports import open_store

Method = TypeVar("Method", bound=Callable[..., Any])


def listen_on_the_address_alone() -> None:
    """Make torch's tcp:// rendezvous, which connects the workers of an engine, use `open_store`.

    So the store listens on one address, not on all of the machine.
    """

    def create(host: str, port: int, rank: int, world: int, timeout: timedelta, use_libuv: bool = True) -> Any:
        return open_store(host, port, server=rank == 0, timeout=timeout, world=world)

    # Imported by its full name, because `torch.distributed.rendezvous` as an attribute is a function.
    import_module("torch.distributed.rendezvous").__dict__["_create_c10d_store"] = create


# vLLM imports this module into each worker before the workers meet.
listen_on_the_address_alone()


def return_errors(method: Method) -> Method:
    """Decorate a method to return its exceptions, as `VllmEngine._call_workers` expects."""

    @wraps(method)
    def answer(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            return error

    return cast(Method, answer)


class RefitWorker:
    """Methods that vLLM mixes into its worker (`worker_extension_cls`)."""

    model_runner: Any
    rank: int
    device: torch.device
    _rl_receiver: WeightReceiver | None = None
    _rl_regions: list[ParamSlice] | UnsupportedLayout | None = None
    _rl_scores: ScoreTable

    @return_errors
    def rl_room(self) -> int:
        """Close the transport; return the free bytes of device memory, 0 on a CPU."""
        if self._rl_receiver:
            self._rl_receiver.close()
            self._rl_receiver = None
        if self.device.type != "cuda":
            return 0
        # Memory of the closed transport that torch still caches must count as free.
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    @return_errors
    def rl_open(
        self, spec: TransportSpec, plan: RefitPlan, first_rank: int, mode: Mode, in_flight: bool, room: int
    ) -> LoadMode:
        """Choose a loader (see `choose_loading`) and join the transport. first_rank: the transport's rank of this
        engine's first worker."""
        loader = self._choose_loader(plan, mode, in_flight, room - receiver_bytes(spec, plan))
        receiver = open_receiver(spec, plan, first_rank + self.rank, self.device)
        self._rl_receiver = WeightReceiver(receiver, loader, self.device)
        return loader.choice

    @return_errors
    def rl_receive(self, header: Header) -> ReceiveReport:
        """Receive now. Raises RefitError."""
        return self._rl.receive(header)

    @return_errors
    def rl_stage(self, header: Header) -> None:
        """Begin to receive into shadow parameters."""
        self._rl.stage(header)

    @return_errors
    def rl_staged(self) -> ReceiveReport | None:
        """Return the receiver's report once everything has arrived, None before. Raises RefitError."""
        return self._rl.staged_report()

    @return_errors
    def rl_commit(self, header: Header) -> None:
        """Make the received weights live for the next step."""
        self._rl.commit()

    @return_errors
    def rl_prove(self, header: Header) -> LiveProof | None:
        """Return the proof that the live tensors are the sent ones; None if there is none. Raises RefitError."""
        return self._rl.prove(header)

    @return_errors
    def rl_committed(self) -> float | None:
        """Return the seconds of the last commit once the device has finished it, None before."""
        return self._rl.commit_seconds()

    @return_errors
    def rl_checksums(self) -> dict[str, int]:
        """Return a checksum of every parameter, every buffer and every other tensor of a module, by name."""
        tensors = live_tensors(self.model_runner.get_model())
        table = ChecksumTable(len(tensors), self.device)
        for tensor in tensors.values():
            # vLLM keeps some tensors on the host.
            table.add(lay(tensor.to(self.device)))
        return dict(zip(tensors, table.all().tolist())) if tensors else {}

    @return_errors
    def rl_open_scores(self) -> None:
        """Score the prompts of `rl_score` from now on. Raises RuntimeError if the model runner cannot."""
        self._rl_scores = ScoreTable(self.model_runner.get_model().compute_logits, self.device)
        watch_steps(self.model_runner, self._rl_scores)

    @return_errors
    def rl_score(self, name: str, request: ScoreRequest) -> None:
        """Score the prompt of a request. name: vLLM's own name of the request."""
        self._rl_scores.add(name, request)

    @return_errors
    def rl_take_scores(self, names: list[str]) -> list[TokenScores]:
        """Remove finished requests; return their scores. Raises RuntimeError if a row was not computed."""
        return self._rl_scores.take(names)

    @return_errors
    def rl_forget_scores(self, names: list[str]) -> None:
        """Remove aborted requests."""
        self._rl_scores.forget(names)

    def rl_memory(self) -> dict[str, float]:
        """Return the bytes of device memory now and at peak; zeros on CPU."""
        if self.device.type != "cuda":
            return {"device_allocated": 0.0, "device_peak": 0.0}
        return {
            "device_allocated": float(torch.cuda.memory_allocated(self.device)),
            "device_peak": float(torch.cuda.max_memory_allocated(self.device)),
        }

    def _choose_loader(self, plan: RefitPlan, mode: Mode, in_flight: bool, room: int) -> WeightLoader:
        adapters = find_adapters(self.model_runner.get_model())
        if adapters is not None:
            return AdapterLoader(plan, adapters, self.device, "adapters are small")
        if self._rl_regions is None:
            # Done only once, while the engine still has the weights that it loaded from the files.
            self._rl_regions = find_regions(self.model_runner, plan, self.device)
        return choose_loading(self.model_runner, plan, self.device, self._rl_regions, mode, in_flight, room)

    @property
    def _rl(self) -> WeightReceiver:
        if self._rl_receiver is None:
            raise RuntimeError("rl_open comes first")
        return self._rl_receiver
