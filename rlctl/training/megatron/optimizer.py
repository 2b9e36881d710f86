"""AdamW in Megatron's distributed optimizer, with its state on the device or on the host.

This module does what Megatron-core 0.16.1 leaves to its callers, or does wrongly without Transformer Engine. It applies
each parameter group's factors of learning rate and weight decay at every step. It creates the optimizer state at the
start, with a step count for each parameter, and a load fills that state in place. Megatron's own loading is not used,
because it shares one step count among all parameters.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import OptimizerConfig, ParamGroupOverride, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.optimizer_config import ParamKey, ParamPredicate
from torch import Tensor, nn

from rlctl.preflight.backends.megatron import hosted_share, megatron_of
from rlctl.preflight.trainer_settings import TrainerSettings
from rlctl.training.update import decayed_names, divide_and_clip

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class OptimizerShard:
    """Optimizer state of the elements `start` to `stop` of one flattened parameter, which this rank updates."""

    start: int
    stop: int
    # float32 [stop - start]: main weights, which AdamW updates and the parameter is rounded from.
    main: Tensor
    # Keys: step (float32 []), exp_avg and exp_avg_sq (both [stop - start]).
    state: dict[str, Tensor]


class Optimizer:
    """Optimizer of this rank's pipeline stage. `ddp` is the stage in Megatron's DistributedDataParallel."""

    def __init__(self, ddp: Any, section: TrainerSettings, dtype: torch.dtype) -> None:
        self._section = section.optimizer
        self._ddp = ddp
        # Name of the attribute in which Megatron stores a parameter's gradient. It depends on
        # `use_precision_aware_optimizer`, see `_optimizer_config`.
        self._gradient_name = "decoupled_grad" if megatron_of(section).optimizer_cpu_offload else "grad"
        self._chained = get_megatron_optimizer(
            _optimizer_config(section, dtype),
            [ddp],
            config_overrides=_without_decay(ddp),
            use_gloo_process_groups=False,
        )
        self._members = [member for member in self._chained.chained_optimizers if not member.is_stub_optimizer]
        self.slots: dict[nn.Parameter, OptimizerShard] = {}
        for member in self._members:
            _make_state(member.optimizer)
            self.slots.update(_slots(member))

    def zero_grad(self) -> None:
        """Set all gradients to 0, before the first backward pass of an update."""
        self._ddp.zero_grad_buffer()
        self._chained.zero_grad(set_to_none=True)

    def clip(self, loss: Tensor, normalizer: float) -> float:
        """Divide the reduced gradients by `normalizer` and clip them. Return their norm after the division.

        loss: this rank's summed loss. Raises FloatingPointError like `update.divide_and_clip`.
        """
        self._chained.prepare_grads()
        # The all-reduce starts before the norm is computed. The host waits for the norm, and then has the loss too.
        dist.all_reduce(loss)
        norm = float(self._chained.get_grad_norm())
        gradients = []
        for member in self._members:
            for parameter in member.get_parameters():
                gradient = getattr(parameter, self._gradient_name, None)
                if gradient is not None:
                    gradients.append(gradient)
        return divide_and_clip(
            gradients,
            ((name, parameter.main_grad) for name, parameter in self._ddp.module.named_parameters()),
            norm=norm,
            loss=float(loss),
            normalizer=normalizer,
            max_norm=self._section.max_grad_norm,
        )

    def step(self, lr: float) -> None:
        """Update the weights by the gradients that `clip` left, at learning rate `lr`."""
        for group in self._chained.param_groups:
            # Megatron applies these factors only in its own scheduler, which is not used. Without them norms would
            # decay like matrices.
            group["lr"] = lr * group.get("lr_mult", 1.0)
            group["weight_decay"] = self._section.weight_decay * group.get("wd_mult", 1.0)
        self._chained.step_with_ready_grads()

    def rehearse(self, loss: Tensor) -> None:
        """Make one optimizer step with gradients 0 at rate 0, which allocates memory. Then set step counts to 0."""
        self._ddp.zero_grad_buffer()
        self.clip(loss, 1.0)
        self.step(0.0)
        for slot in self.slots.values():
            slot.state["step"].zero_()

    def publish(self, main_of: Callable[[OptimizerShard], Tensor]) -> None:
        """Round the main weights, just read from a checkpoint, to the parameters, and gather these on all ranks.

        main_of: returns the main weights of a shard in the memory where they are now.
        """
        with torch.no_grad():
            for parameter, slot in self.slots.items():
                parameter.data.view(-1)[slot.start : slot.stop].copy_(main_of(slot))
            self._ddp.start_param_sync(force_sync=True)

    def group(self, parameter: nn.Parameter) -> dist.ProcessGroup:
        """Return the process group whose ranks each hold a part of the parameter's optimizer state."""
        is_dense = getattr(parameter, "allreduce", True)
        return self._ddp.intra_dp_cp_group if is_dense else self._ddp.intra_expt_dp_group  # type: ignore[no-any-return]

    def device_state(self) -> list[Tensor]:
        """Return the optimizer's tensors: moments, and main weights that do not share memory with the parameters."""
        state = []
        for parameter, slot in self.slots.items():
            state += [slot.state[key] for key in MOMENTS]
            if slot.main.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr():
                state.append(slot.main)
        return state


def gradients(ddp: Any) -> list[Tensor]:
    """Return the float32 buffers in which Megatron's DistributedDataParallel stores all gradients."""
    return [buffer.grad_data for buffer in chain(ddp.buffers, ddp.expert_parallel_buffers)]


def _optimizer_config(section: TrainerSettings, dtype: torch.dtype) -> OptimizerConfig:
    adamw = section.optimizer
    megatron = megatron_of(section)
    config = OptimizerConfig(
        optimizer="adam",
        lr=adamw.lr,
        weight_decay=adamw.weight_decay,
        adam_beta1=adamw.betas[0],
        adam_beta2=adamw.betas[1],
        adam_eps=adamw.eps,
        clip_grad=adamw.max_grad_norm,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
        optimizer_cpu_offload=megatron.optimizer_cpu_offload,
        optimizer_offload_fraction=hosted_share(section),
        overlap_cpu_optimizer_d2h_h2d=megatron.overlap_cpu_optimizer_d2h_h2d,
    )
    if megatron.optimizer_cpu_offload:
        # OptimizerConfig refuses these arguments without Transformer Engine, so they are set afterwards. The optimizer
        # on the host needs only their effect: float32 weights exist on the host alone, without a copy on the device.
        config.use_precision_aware_optimizer = True
        config.use_precision_aware_optimizer_no_fp8_or_ds_fp8 = True
        config.store_param_remainders = False
    return config


def _without_decay(ddp: Any) -> dict[ParamKey, ParamGroupOverride]:
    """Return Megatron's overrides that exempt norms and biases from weight decay.

    They replace Megatron's own rule, which exempts parameters by their number of dimensions.
    """
    names = decayed_names(ddp.module)
    decayed = {id(parameter) for name, parameter in ddp.module.named_parameters() if name in names}
    undecayed = ParamPredicate(name="undecayed", fn=lambda parameter: id(parameter) not in decayed)
    return {ParamKey(predicate=undecayed): ParamGroupOverride(wd_mult=0.0)}


def _make_state(optimizer: Any) -> None:
    """Create the AdamW state of every parameter, all 0, and select torch's fused AdamW kernel."""
    adamws = optimizer.sub_optimizers if isinstance(optimizer, HybridDeviceOptimizer) else [optimizer]
    for adamw in adamws:
        for group in adamw.param_groups:
            group["fused"] = True
            group["foreach"] = False
            for main in group["params"]:
                if main.device.type == "cpu" and torch.cuda.is_available():
                    # Megatron pins its host copy, but then replaces it with an unpinned float32 copy. Transfers from
                    # unpinned memory run at half the speed.
                    main.data = main.data.pin_memory()
                step = torch.zeros((), dtype=torch.float32, device=main.device)
                adamw.state[main] = {"step": step} | {key: torch.zeros_like(main.detach()) for key in MOMENTS}


def _slots(member: Any) -> Iterator[tuple[nn.Parameter, OptimizerShard]]:
    if isinstance(member.optimizer, HybridDeviceOptimizer):
        hybrid = member.optimizer
        states = {}
        for adamw in hybrid.sub_optimizers:
            states.update(adamw.state)
        shards = _pairs(member.model_float16_groups, member.shard_float16_groups)
        pairs = [(parameter, hybrid.param_to_inner_param[shard]) for parameter, shard in shards]
    else:
        states = member.optimizer.state
        pairs = [
            *_pairs(member.model_float16_groups, member.shard_fp32_from_float16_groups),
            *_pairs(member.model_fp32_groups, member.shard_fp32_groups),
        ]
    for parameter, main in pairs:
        elements = member._get_model_param_range_map(parameter)["param"]
        yield (
            parameter,
            OptimizerShard(start=elements.start, stop=elements.end, main=main.detach(), state=states[main]),
        )


def _pairs(groups: Any, shard_groups: Any) -> Iterator[tuple[nn.Parameter, Tensor]]:
    for parameters, shards in zip(groups, shard_groups):
        yield from zip(parameters, shards)
