"""Facts of a model that are observed in one forward pass instead of read from its config.

The model has its real sizes on the meta device, so it needs no memory. Recorders replace its attention and state
functions. Real numbers replace the head's output, so that the function from head output to logits can be fitted.
"""

import copy
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain, product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from rlctl.models.facts import RowBytes
from rlctl.models.layer_kinds import AttentionKind, LayerKinds, LogitTransform, StateKind
from rlctl.models.packed_attention import NAME, refuse_keywords, register
from rlctl.models.state_layers import FUNCTIONS

_PASS_TOKENS = 4
_EXPERTS = "rlctl_observed"
# Keys of config.json with a rate of dropout, of skipped layers, or of noise.
_DROPS = re.compile(r"dropout|pdrop$|layerdrop|drop_(path_)?rate$|jitter(_noise|_eps)?$")
# State functions that cannot restart within a pack: Mamba-1's.
_NOT_RESTARTED = ("mamba_selective_scan",)
# Values in layer_types of layers whose output does not depend on earlier tokens.
_STATELESS = ("mlp", "moe", "dense", "sparse")
# Key of config.json -> exponent: the head's output is multiplied by the value to this power.
_SCALES = {"logits_scaling": -1, "logit_scale": 1, "lm_head_multiplier": 1}


def observe(config: Any) -> LayerKinds:
    """Observe the kinds of a causal LM's layers, given its transformers config.

    Raises ValueError if the forward pass fails on the meta device, for an attention keyword that packed attention does
    not support, or for an unknown function from head output to logits.
    """
    from transformers import AutoModelForCausalLM
    from transformers.integrations.moe import ExpertsInterface

    config = copy.deepcopy(config)
    dropout = turn_off_dropout(config)
    # Grouped matrix products lack a meta implementation for some dtypes and widths.
    ExpertsInterface.register(_EXPERTS, lambda experts, hidden, *_: torch.empty_like(hidden))
    make = partial(AutoModelForCausalLM.from_config, dtype=torch.bfloat16, experts_implementation=_EXPERTS)
    with torch.device("meta"):
        try:
            # A copy, because a failure leaves its attn_implementation in the config.
            lm = make(copy.deepcopy(config), attn_implementation=register())
            record = _Record()
        except KeyError:
            lm = make(config, attn_implementation="eager")
            record = _Record(f"{config.model_type} does not let others compute its attention")
        turn_off_padding_warning(lm)
        logits, head_output = _forward_pass(lm.eval(), record)
    return LayerKinds(
        logits=_fit_logits(config, logits, head_output),
        attention=tuple(sorted(record.attention.values(), key=lambda kind: kind.layer)),
        states=tuple(StateKind(layer, tuple(names)) for layer, names in sorted(record.states.items())),
        one_sequence_a_row=_why_not_packed(config, record),
        dropout=tuple(dropout.items()),
    )


def turn_off_padding_warning(lm: nn.Module) -> None:
    """Disable a warning of transformers' classes (GPT-2's) that reads the tokens in each forward pass without a mask.

    Tokens on the meta device cannot be read, and on a GPU reading them would wait for the device.
    """
    for module in lm.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = lambda *_: None  # type: ignore[assignment]


def turn_off_dropout(config: Any) -> dict[str, float]:
    """Set every dropout rate and router jitter of a transformers config to 0. Return key -> rate of those above 0.

    Engines sample without dropout, so log-probs with dropout would be of another policy.
    """
    rates: dict[str, float] = {}
    for key, setting in vars(config).items():
        if isinstance(setting, (int, float)) and _DROPS.search(key) and setting > 0:
            rates[key] = float(setting)
            setattr(config, key, 0.0)
        elif hasattr(setting, "model_type"):
            rates |= turn_off_dropout(setting)
    return rates


# Most tokens of a row whose kept bytes are measured. It is above 256, the largest block of linear attention.
_LONGEST_ROW = 512
# Compute dtypes of a trainer.
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def measure_row_bytes(decoder: nn.Module, longest: int) -> Iterator[RowBytes]:
    """Yield for each compute dtype the bytes that a decoder on the meta device keeps for its backward pass.

    The bytes of a row of n tokens are a * n + b * n * n. Two row lengths within the longest sequence give a and b.
    torch's own attention kernels keep no scores, so b is 0 for them.
    """
    last = max(2, min(_LONGEST_ROW, longest))
    first = last // 2
    for name, dtype in _DTYPES.items():
        short_row = _kept_bytes(copy.deepcopy(decoder).to(dtype), first)
        long_row = _kept_bytes(copy.deepcopy(decoder).to(dtype), last)
        pair = max(0.0, (long_row / last - short_row / first) / (last - first))
        yield RowBytes(name, token=round(short_row / first - pair * first), pair=round(pair))


def _kept_bytes(decoder: nn.Module, tokens: int) -> int:
    """Return the bytes of all distinct tensors, without parameters, that the forward pass of one row keeps."""
    model_storages = {tensor.untyped_storage()._cdata for tensor in chain(decoder.parameters(), decoder.buffers())}
    # Storage -> the largest kept tensor in this storage.
    kept_tensors: dict[int, Tensor] = {}

    def pack(saved: Tensor) -> Tensor:
        storage = saved.untyped_storage()._cdata
        if storage not in model_storages and kept_tensors.setdefault(storage, saved).nbytes < saved.nbytes:
            kept_tensors[storage] = saved
        return saved

    keep: Any = _Kept.apply

    def attend(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, **options: Any) -> Any:
        if query.shape[-3] != key.shape[-3] and not options.get("enable_gqa"):
            # Without enable_gqa torch's kernels refuse fewer key heads than query heads, and torch computes by matrix
            # products in float32.
            return ((query @ key.mT).softmax(-1, torch.float32) @ value.float()).to(query.dtype)
        # The attention kernel keeps its result too.
        return keep((*query.shape[:-1], value.shape[-1]), True, query, key, value, attn_mask)

    def multiply(rows: Tensor, matrices: Tensor, **_: Any) -> Any:
        return keep((len(rows), matrices.shape[-1]), False, rows, matrices)

    ids = torch.zeros(1, tokens, dtype=torch.long, device="meta")
    decoder.train()
    with torch.device("meta"), ExitStack() as stack:
        for name, stand_in in {"scaled_dot_product_attention": attend, "grouped_mm": multiply}.items():
            stack.callback(setattr, F, name, getattr(F, name))
            setattr(F, name, stand_in)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved))
        stack.enter_context(_Yes())
        decoder(input_ids=ids, use_cache=False)
    return sum(tensor.nbytes for tensor in kept_tensors.values())


class _Yes(TorchFunctionMode):
    """Mode in which every test of a tensor's value is True, because meta tensors have no values. It means: a row is one
    sequence without padding.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__bool__, Tensor.item):
            return True
        return func(*args, **(kwargs or {}))


class _Kept(torch.autograd.Function):
    """Replacement for a kernel without a meta implementation. It saves its arguments for the backward pass, and its
    result if `keeps_result`.
    """

    @staticmethod
    def forward(ctx: Any, shape: tuple[int, ...], keeps_result: bool, *arguments: Tensor | None) -> Tensor:
        assert arguments[0] is not None
        out = arguments[0].new_empty(shape)
        saved = (*arguments, out) if keeps_result else arguments
        ctx.save_for_backward(*saved)
        return out


class _Record:
    """Recorded attention and state calls of one forward pass, by layer."""

    def __init__(self, unpacked: str | None = None) -> None:
        # Reason why the model's attention cannot separate the sequences of a pack; None if it can.
        self.unpacked = unpacked
        self.attention: dict[int, AttentionKind] = {}
        self.states: dict[int, list[str]] = {}
        self.not_restarted: set[str] = set()
        # Index of the layer whose forward pass is running.
        self.layer = -1

    def record_attention(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Record a layer's attention call. Return an empty tensor of the output's shape."""
        boundaries = kwargs.pop("cu_seq_lens_q", None)
        max_length = kwargs.pop("max_length_q", None)
        if boundaries is None or max_length is None:
            self.unpacked = f"{type(module).__name__} is not told where the sequences of a pack begin"
        refuse_keywords(module, attention_mask=attention_mask, **kwargs)
        _, heads, tokens, dim = query.shape
        self.attention[self.layer] = AttentionKind(
            layer=self.layer,
            window=sliding_window,
            softcap=softcap,
            sinks=s_aux is not None,
            scale=float(dim**-0.5 if scaling is None else scaling),
            heads=heads,
            kv_heads=key.shape[1],
            dim=dim,
            v_dim=value.shape[3],
        )
        return query.new_empty(1, tokens, heads, value.shape[3]), None

    def make_stand_in(self, name: str, original: Any) -> Any:
        """Return a replacement for a state function. It records each call in the running layer."""

        def stand_in(*args: Any, **kwargs: Any) -> Any:
            if name not in FUNCTIONS:
                # The shapes of the results are not known here, so transformers' plain torch function computes them.
                self.not_restarted.add(name)
                self.states.setdefault(self.layer, []).append(name)
                return inspect.unwrap(original)(*args, **kwargs)
            calls = self.states.setdefault(self.layer, [])
            if name not in calls:
                calls.append(name)
            return FUNCTIONS[name].empty_results(*args)

        return stand_in


def _forward_pass(lm: Any, record: _Record) -> tuple[Tensor, Tensor]:
    """Run a forward pass that fills `record`. Return the logits and the head output from which they were computed."""
    head_output = torch.linspace(-60.0, 60.0, 12 * _PASS_TOKENS, device="cpu").view(1, _PASS_TOKENS, 12)
    head = lm.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(lm).__name__} has no output head")
    tokens = torch.zeros(1, _PASS_TOKENS, dtype=torch.long)
    pack = {"cu_seq_lens_q": torch.zeros(2, dtype=torch.int32), "max_length_q": _PASS_TOKENS}
    if record.unpacked:
        # A mask must be given, because transformers would read positions to build one.
        pack = {"attention_mask": torch.ones_like(tokens)}
    with _record_calls(lm, record), torch.no_grad():
        handle = head.register_forward_hook(lambda *_: head_output.clone())
        try:
            output = lm(input_ids=tokens, position_ids=torch.zeros_like(tokens), use_cache=False, **pack)
        except (RuntimeError, TypeError, KeyError, AttributeError, IndexError) as error:
            reason = str(error).strip().splitlines() or [repr(error)]
            raise ValueError(f"{type(lm).__name__} has no forward pass on the meta device: {reason[0]}") from error
        finally:
            handle.remove()
    return output.logits, head_output


@contextmanager
def _record_calls(lm: Any, record: _Record) -> Iterator[None]:
    from transformers import AttentionInterface

    def enter(module: nn.Module, *_: Any) -> None:
        record.layer = module.layer_idx  # type: ignore[assignment]

    home = sys.modules[type(lm).__module__]
    with ExitStack() as stack:
        for name in (*FUNCTIONS, *_NOT_RESTARTED):
            if hasattr(home, name):
                stack.callback(setattr, home, name, getattr(home, name))
                setattr(home, name, record.make_stand_in(name, getattr(home, name)))
        for module in lm.modules():
            if isinstance(getattr(module, "layer_idx", None), int):
                stack.callback(module.register_forward_pre_hook(enter).remove)
        AttentionInterface.register(NAME, record.record_attention)
        stack.callback(register)
        yield


def _why_not_packed(config: Any, record: _Record) -> str | None:
    if record.unpacked:
        return record.unpacked
    types = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    if "chunked_attention" in types:
        return "chunked attention counts its chunks from the start of the row"
    if record.not_restarted:
        return f"{min(record.not_restarted)} cannot restart at a sequence's start"
    recorded_layers = record.attention.keys() | record.states.keys()
    unseen_types = [kind for layer, kind in enumerate(types) if layer not in recorded_layers and kind not in _STATELESS]
    if unseen_types:
        layers = f"{len(unseen_types)} of {len(types)} layers ({', '.join(sorted(set(unseen_types)))})"
        return f"{layers} call neither attention nor a known state function"
    return None


def _fit_logits(config: Any, logits: Tensor, head_output: Tensor) -> LogitTransform:
    """Return the transform by the config's keys that maps `head_output` to `logits`. Raises ValueError if none does."""
    factors = [1.0]
    for key, power in _SCALES.items():
        if factor := getattr(config, key, None):
            factors.append(float(factor) ** power)
    cap = getattr(config, "final_logit_softcapping", None)
    for softcap, scale in product((None, cap), factors):
        expected = head_output * scale
        if softcap:
            expected = softcap * torch.tanh(expected / softcap)
        if logits.shape == head_output.shape and torch.allclose(logits.float(), expected, rtol=1e-5, atol=1e-5):
            return LogitTransform(scale, softcap)
    raise ValueError(
        f"the logits of {config.model_type} are neither its head's output, nor scaled by {', '.join(_SCALES)}, "
        "nor capped by final_logit_softcapping"
    )
