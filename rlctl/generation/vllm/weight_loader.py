"""Ways in which a vLLM worker receives new weights and makes them live.

Mode staged: a thread receives into shadow parameters while the engine samples. Then one short commit copies them to the
live parameters. The device makes the commit after its queued steps, and the host prepares the next step meanwhile. If
receiving fails, the live weights stay unchanged. Mode direct: the worker receives into the live weights, and samples
nothing meanwhile. In both modes the receiver has checked every item before `commit` returns.
"""

import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from rlctl.generation.vllm.param_layout import UnsupportedLayout, list_unregistered
from rlctl.refit.param_slices import ParamSlice, ParamSliceSink, ShadowParams, verify_complete
from rlctl.refit.pipeline import ChunkReceiver
from rlctl.refit.protocol import Header, LiveProof, LoadMode, Mode, ReceiveReport, RefitError
from rlctl.refit.refit_plan import RefitPlan
from rlctl.refit.weight_sink import WeightSink, WholeTensorSink
from rlctl.utils.device_stream import Span, mark_here, total_seconds

# Bytes of device memory that must stay free besides the shadow parameters, for the engine's temporary tensors.
_SPARE_BYTES = 2 << 30


class WeightLoader(Protocol):
    """A way to receive a version and make it live."""

    sink: WeightSink
    choice: LoadMode

    def commit(self) -> None:
        """Make the received weights live. On return the work is done, or queued on the current stream."""

    def prove(self, header: Header, sent: Mapping[int, int]) -> LiveProof | None:
        """Return the proof that the live tensors are the sent ones; None if this loader gives no proof.

        sent: number of an item -> its verified checksum. Raises RefitError that names a differing tensor.
        """
        return None


class WeightReceiver:
    """Receiving end of a refit in one vLLM worker."""

    def __init__(self, receiver: ChunkReceiver, loading: WeightLoader, device: torch.device) -> None:
        self._receiver = receiver
        self._loading = loading
        self._device = device
        self._staging: threading.Thread | None = None
        self._staged: ReceiveReport | Exception | None = None
        # (begin and end marks of the last commit on the device, seconds of that commit on the host).
        self._committing: tuple[Span, float] | None = None

    @property
    def choice(self) -> LoadMode:
        """Chosen way to receive weights."""
        return self._loading.choice

    @property
    def sink(self) -> WeightSink:
        """Destination of received versions."""
        return self._loading.sink

    def stage(self, header: Header) -> None:
        """Begin to receive on a thread. `staged_report` returns a report once the thread is done."""
        self._staged = None
        self._staging = threading.Thread(target=self._receive_staged, args=(header,), name="refit", daemon=True)
        self._staging.start()

    def staged_report(self) -> ReceiveReport | None:
        """Return the receiver's report once everything has arrived, None before. Raises the error of receiving."""
        if isinstance(self._staged, Exception):
            raise self._staged
        return self._staged

    def receive(self, header: Header) -> ReceiveReport:
        """Receive now, on this thread. Raises RefitError."""
        return self._receiver.receive(header, self._loading.sink)

    @torch.no_grad()
    def commit(self) -> None:
        """Make the received version live for all steps that are queued from now on.

        The host does not wait for the device. Do not receive the next version until `commit_seconds` returns a number.
        With adapters, call `prove` next.
        """
        host_begin = time.perf_counter()
        device_begin = mark_here(self._device)
        self._loading.commit()
        device_span = (device_begin, mark_here(self._device))
        self._committing = device_span, time.perf_counter() - host_begin

    @torch.no_grad()
    def prove(self, header: Header) -> LiveProof | None:
        """Return the loader's proof that the live tensors are the sent ones; None if the loader gives no proof. Raises
        RefitError that names a differing tensor."""
        return self._loading.prove(header, self._receiver.received)

    def commit_seconds(self) -> float | None:
        """Return the seconds of the last commit once the device has finished it, None before."""
        assert self._committing, "commit comes before commit_seconds"
        device_span, host_seconds = self._committing
        _, device_end = device_span
        return max(host_seconds, total_seconds([device_span])) if device_end.is_reached() else None

    def close(self) -> None:
        """Close the transport. A thread that is still receiving ends with an error."""
        self._receiver.close()

    def _receive_staged(self, header: Header) -> None:
        try:
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)
            with torch.no_grad():
                self._staged = self.receive(header)
        except Exception as error:
            self._staged = error
        except BaseException as error:  # otherwise the thread would end silently, and `staged_report` never report
            self._staged = RuntimeError(f"receiving ended by {type(error).__name__}")


class DirectLoader(WeightLoader):
    """Receives directly into the live parameters."""

    def __init__(self, plan: RefitPlan, regions: list[ParamSlice], reason: str, overwrites: bool) -> None:
        self.sink: WeightSink = ParamSliceSink(plan, regions)
        self.choice = LoadMode("direct", reason, 0, overwrites)

    def commit(self) -> None:
        """Do nothing: the weights are live already."""


class ShadowLoader(WeightLoader):
    """Receives into a second copy of every parameter."""

    def __init__(
        self,
        plan: RefitPlan,
        regions: list[ParamSlice],
        reason: str,
        overwrites: bool,
        parameters: dict[str, Tensor],
    ) -> None:
        self._shadow = ShadowParams(parameters, regions)
        # Wait, because this thread's stream makes the shadow parameters, and other streams will write there.
        torch.cuda.synchronize()
        self.sink: WeightSink = ParamSliceSink(plan, self._shadow.regions, beside_requests=True)
        self.choice = LoadMode("staged", reason, self._shadow.nbytes, overwrites)

    def commit(self) -> None:
        self._shadow.commit()


class WholeTensorLoader(WeightLoader):
    """Receives whole tensors, and passes them to the engine's own loader."""

    def __init__(self, plan: RefitPlan, runner: Any, device: torch.device, reason: str) -> None:
        self._whole_tensors = WholeTensorSink(plan, device)
        self._runner = runner
        self._device = device
        self.sink: WeightSink = self._whole_tensors
        device_bytes = 0 if device.type == "cpu" else plan.nbytes
        self.choice = LoadMode("staged", reason, device_bytes, overwrites=False)


class InPlaceLoader(WholeTensorLoader):
    """Makes the engine's loader write into the live parameters, if `loads_in_place` allows that.

    gpt_oss needs this loader: vLLM copies its experts and sinks without the parameters' own loaders, so that
    `ReloadLoader` would leave them unchanged. vLLM then only logs a warning.
    """

    def commit(self) -> None:
        """Load the weights in place. CUDA graphs stay valid, since no tensor moves."""
        self._runner.get_model().load_weights(self._whole_tensors.tensors())


class ReloadLoader(WholeTensorLoader):
    """Makes the engine load all weights again as at its start, including fusing and repacking."""

    def commit(self) -> None:
        """Reload the weights. The parameters keep their storage, so that CUDA graphs stay valid.

        Raises RefitError if vLLM leaves some weights unchanged.
        """
        with LostWeights() as lost:
            self._runner.reload_weights(weights_iterator=self._whole_tensors.tensors())
        if self._device.type == "cpu":
            _repack_for_cpu(self._runner.get_model())
        elif lost.layers:
            raise RefitError(f"vLLM's reload leaves weights as they were: {', '.join(lost.layers)}")


def choose_loading(
    runner: Any,
    plan: RefitPlan,
    device: torch.device,
    regions: list[ParamSlice] | UnsupportedLayout,
    mode: Mode,
    in_flight: bool,
    room: int,
) -> WeightLoader:
    """Return the loader for a mode ("auto", "staged" or "direct").

    runner: vLLM's model runner. regions: from `find_regions`. in_flight: True if sampling continues during a refit.
    room: bytes free on the device of each worker of the engine, after the transport's buffers.

    Raises RefitError for "direct" if the engine rearranges its weights, for "staged" if memory is short, and for
    parameters that the plan does not fill.
    """
    if isinstance(regions, UnsupportedLayout):
        if mode == "direct":
            raise RefitError(f"refit.mode=direct needs an engine that keeps weights as they are sent: {regions}")
        if regions.in_place:
            return InPlaceLoader(plan, runner, device, f"{regions}; vLLM's loader then writes in place")
        return ReloadLoader(plan, runner, device, str(regions))
    model = runner.get_model()
    parameters = dict(model.named_parameters())
    verify_complete(regions, parameters, _list_padded(model))
    shadow_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters.values())
    shadow_fits = room >= shadow_bytes + _SPARE_BYTES
    sizes = f"{shadow_bytes / 2**30:.1f} GiB needed, {room / 2**30:.1f} GiB free"
    if mode == "staged" and not shadow_fits:
        raise RefitError(f"refit.mode=staged: {sizes}: lower generation.gpu_memory_utilization or use direct")
    if mode != "auto":
        reason = "as configured"
    elif in_flight:
        reason = sizes
    else:
        reason = "nothing samples during a refit"
    other_tensors = list_unregistered(model)
    if other_tensors:
        reason += f"; {other_tensors[0]} is no parameter and is kept"
    # Tensors that no refit writes must survive `sleep`, so the weights must not be dropped.
    overwrites = not other_tensors
    if mode == "staged" or (mode == "auto" and in_flight and shadow_fits):
        return ShadowLoader(plan, regions, reason, overwrites, parameters)
    return DirectLoader(plan, regions, reason, overwrites)


class LostWeights(logging.Handler):
    """Collects, within a `with` block, the layers for which vLLM's reload logs "Failed to load weights". Heads are
    ignored, since they may be tied to the embedding."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
        self._level = self._logger.level
        self.layers: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        layer, _, message = record.getMessage().partition(": ")
        if message == "Failed to load weights" and layer not in (*self.layers, "ParallelLMHead"):
            self.layers.append(layer)

    def __enter__(self) -> "LostWeights":
        # VLLM_LOGGING_LEVEL may have turned warnings off.
        self._logger.setLevel(logging.WARNING)
        self._logger.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._logger.removeHandler(self)
        self._logger.setLevel(self._level)


def _list_padded(model: torch.nn.Module) -> set[str]:
    """Return the names of parameters with rows of padding: embeddings and heads with rounded-up vocabularies."""
    return {f"{name}.weight" for name, module in model.named_modules() if hasattr(module, "num_embeddings_padded")}


def _repack_for_cpu(model: torch.nn.Module) -> None:
    """Update the CPU kernels' own copies of weights.

    On CPU, heads and experts compute with repacked copies that `reload_weights` does not update (seen in vLLM 0.32):
    with tied embeddings the head would keep the old weights, and experts would read unpacked memory as packed. vLLM
    would raise no error, and sample wrong tokens.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(module, VocabParallelEmbedding) and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)
        elif (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)
