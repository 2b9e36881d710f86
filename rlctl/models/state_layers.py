"""Packed sequences in layers that carry a state from token to token: gated delta, KDA, Mamba-2, short convolutions.

transformers calls one module-level function per kind. `install_restarts` replaces that function by one that starts
every sequence of a pack with an empty state. On a GPU it uses flash-linear-attention's kernels, elsewhere plain torch.
"""

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rlctl.models.attention_kernels import length_groups
from rlctl.models.layer_kinds import has_kernels, is_installed

Function = Callable[..., Any]
# Function for a whole Mamba-2 layer, which transformers calls first. From transformers 5.20 on it refuses packs without
# its package.
_FUSED = "mamba2_split_conv1d_scan_combined"
# Keywords that describe the sequences of a pack. A call for one sequence per row has none.
_PACKING = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class StateFunction:
    """A function of transformers' modules whose output at a token depends on earlier tokens."""

    # Package whose kernel transformers calls instead, if it is installed.
    package: str
    # Returns a version of transformers' plain torch function that restarts at each sequence.
    make_restarting: Callable[[Function], Function]
    # flash-linear-attention's kernel with transformers' signature plus cu_seqlens. It is used if the package's kernel
    # is not usable.
    kernel: Function | None = None
    # like: index of the argument with the output's shape. results: number of values that the function returns.
    like: int = 0
    results: int = 1

    def empty_results(self, *args: Any) -> Any:
        """Return empty tensors in the shapes of the function's results."""
        out = args[self.like].new_empty(args[self.like].shape)
        return (out, None) if self.results == 2 else out


def install_restarts(lm: Any) -> list[str]:
    """Replace the state functions in a model's Python module by ones that restart at each sequence. Return their names.

    A call without sequence boundaries computes as before. A second call changes nothing.
    """
    home = sys.modules[type(lm).__module__]
    names = [name for name in FUNCTIONS if hasattr(home, name)]
    for name in names:
        original = getattr(home, name)
        if not hasattr(original, "restarts"):
            setattr(home, name, _restart_function(original, FUNCTIONS[name]))
    fused = getattr(home, _FUSED, None)
    if fused is not None and not hasattr(fused, "restarts"):
        setattr(home, _FUSED, _restart_function(fused, StateFunction("mamba_ssm", lambda _: _none)))
    return names


def _none(*_: Any, **__: Any) -> None:
    """Return None: transformers then calls the layer's single functions, as without the fused function's package."""


@cache
def _has_scalar_gates() -> bool:
    """Return True if kernels with one gate per head have a correct backward pass on this machine.

    On Hopper GPUs Triton from 3.4.0 to below 3.7.1 computes it wrongly, and flash-linear-attention refuses it. Kernels
    with one gate per channel are correct there: they get the same gate for all channels of a head.
    """
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    return not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1


def _package_works(function: "StateFunction") -> bool:
    """Return True if the kernel that transformers chooses is installed and works here."""
    if not is_installed(function.package):
        return False
    return function.package != "fla" or function.kernel is None or _has_scalar_gates()


def _restart_function(original: Function, function: StateFunction) -> Function:
    """Return the replacement for transformers' function `original`."""
    # `original` chooses between a package's kernel and plain torch. The plain torch function is inside the wrapper.
    reference = inspect.unwrap(original)
    restarting_reference = function.make_restarting(reference)

    # torch.compile cannot handle shapes that depend on data.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @wraps(reference)
    def restarting(*args: Any, **keywords: Any) -> Any:
        ends = _boundaries(keywords)
        is_half = args[0].is_cuda and args[0].dtype in (torch.float16, torch.bfloat16)
        if is_half and _package_works(function):
            if ends is not None and function.package == "fla":
                keywords["cu_seqlens"] = _long(ends)
            return original(*args, **keywords)
        unpacked_keywords = {name: argument for name, argument in keywords.items() if name not in _PACKING}
        if is_half and function.kernel is not None and has_kernels():
            return function.kernel(*args, cu_seqlens=None if ends is None else _long(ends), **unpacked_keywords)
        # Two ends are those of one sequence.
        if ends is None or len(ends) == 2:
            return reference(*args, **unpacked_keywords)
        return restarting_reference(ends, *args, **unpacked_keywords)

    restarting.restarts = True
    return restarting  # type: ignore[no-any-return]


def _boundaries(keywords: dict[str, Any]) -> Tensor | None:
    """Return the cu_seqlens tensor in a call's keywords; None for a call without packs."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if keywords.get(name) is not None:
            return keywords[name]  # type: ignore[no-any-return]
    seq_idx = keywords.get("seq_idx")
    return None if seq_idx is None else _sequence_ends(seq_idx)


# Cached so that all layers of a pack get the same tensor: flash-linear-attention caches by tensor identity.
@lru_cache(maxsize=2)
def _sequence_ends(seq_idx: Tensor) -> Tensor:
    """Return cu_seqlens, int32 [S + 1], from seq_idx, int32 [1, T]."""
    return F.pad(seq_idx[0].bincount().cumsum(0), (1, 0)).int()


@lru_cache(maxsize=2)
def _long(ends: Tensor) -> Tensor:
    return ends.long()


def _restarted_scan(reference: Function) -> Function:
    """Return a scan over dimension 1 that restarts: one padded batch for each group of sequences of similar length.

    Padding comes after the tokens of a sequence, so it changes no state that is used.
    """

    def scan(ends: Tensor, *args: Any, **keywords: Any) -> Any:
        tokens = args[0].shape[1]
        out: Tensor | None = None
        has_state = False
        for rows, is_real in length_groups(ends):
            readable_rows = rows.clamp(max=tokens - 1)

            def take_rows(argument: Any, readable_rows: Tensor = readable_rows) -> Any:
                """Index an argument that has a row for each token; return other arguments unchanged."""
                if isinstance(argument, Tensor) and argument.ndim > 2 and argument.shape[:2] == (1, tokens):
                    return argument[0][readable_rows]
                return argument

            batch_keywords = {name: take_rows(argument) for name, argument in keywords.items()}
            outcome = reference(*map(take_rows, args), **batch_keywords)
            has_state = isinstance(outcome, tuple)
            batch_out: Tensor = outcome[0] if has_state else outcome
            if out is None:
                out = batch_out.new_zeros(tokens, *batch_out.shape[2:])
            out = out.index_copy(0, rows[is_real], batch_out[is_real])
        assert out is not None
        return (out[None], None) if has_state else out[None]

    return scan


def _restarted_conv(reference: Function) -> Function:
    """Return a causal convolution that restarts: zeros between sequences, as many as the convolution looks back."""

    def convolve(ends: Tensor, hidden: Tensor, weight: Tensor, *args: Any, **keywords: Any) -> Tensor:
        gap = weight.shape[-1] - 1
        tokens = hidden.shape[2]
        sequences = len(ends) - 1
        positions = torch.arange(tokens, device=hidden.device)
        spread_positions = positions + gap * (torch.bucketize(positions, ends, right=True) - 1)
        zeros = hidden.new_zeros(*hidden.shape[:2], tokens + gap * (sequences - 1))
        spread = zeros.index_copy(2, spread_positions, hidden)
        out: Tensor = reference(spread, weight, *args, **keywords)
        return out.index_select(2, spread_positions)

    return convolve


def _fla_conv(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    cu_seqlens: Tensor | None,
    **_: Any,
) -> Tensor:
    """Compute a convolution by flash-linear-attention's Triton kernel. hidden: [1, channels, T]; weight: [channels,
    width].
    """
    from fla.modules.causal_conv1d import causal_conv1d

    out: Tensor = causal_conv1d(
        x=hidden.transpose(1, 2).contiguous(), weight=weight, bias=bias, activation=activation, cu_seqlens=cu_seqlens
    )[0]
    return out.transpose(1, 2)


def _each_channel(gates: Tensor, width: int) -> Tensor:
    """Repeat gates [1, T, heads] for `width` channels: float32 [1, T, heads, width]."""
    return gates.float()[..., None].expand(*gates.shape, width).contiguous()


def _fla_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    cu_seqlens: Tensor | None,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute the gated delta rule by the kernel for Kimi delta attention, with equal gates for all channels of a head.

    query, key: [1, T, heads, dim]; value: [1, T, heads, v_dim]; g, beta: [1, T, heads].
    """
    from fla.ops.kda import chunk_kda

    normed = {"use_qk_l2norm_in_kernel": use_qk_l2norm_in_kernel, "cu_seqlens": cu_seqlens}
    out: Tensor = chunk_kda(query, key, value, _each_channel(g, key.shape[-1]), beta, **normed)[0]
    return out, None


def _fla_mamba2(
    hidden: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    *,
    cu_seqlens: Tensor | None,
    **_: Any,
) -> Tensor:
    """Compute Mamba-2 as gated linear attention with one decay per head, exp(A dt): queries C, keys B, values dt x.

    hidden: [1, T, heads, head_dim]; dt: [1, T, heads]; A, D, dt_bias: [heads]; B, C: [1, T, groups, state].
    """
    from fla.ops.gla import chunk_gla
    from fla.ops.simple_gla import chunk_simple_gla

    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit).float()
    heads_a_group = hidden.shape[2] // B.shape[2]
    keys = B.repeat_interleave(heads_a_group, 2)
    queries = C.repeat_interleave(heads_a_group, 2)
    values = (hidden * dt[..., None]).to(hidden.dtype)
    gates = A.float() * dt
    if _has_scalar_gates():
        scan = chunk_simple_gla
    else:
        gates = _each_channel(gates, keys.shape[-1])
        scan = chunk_gla
    out: Tensor = scan(queries, keys, values, g=gates, scale=1.0, cu_seqlens=cu_seqlens)[0]
    return out if D is None else out + D[:, None] * hidden


# Name in transformers' modules -> state function.
FUNCTIONS = {
    "causal_conv1d_fn": StateFunction("causal_conv1d", _restarted_conv, _fla_conv),
    "torch_chunk_gated_delta_rule": StateFunction("fla", _restarted_scan, _fla_delta, like=2, results=2),
    "chunk_kimi_delta_attention": StateFunction("fla", _restarted_scan, like=2, results=2),
    "mamba2_chunk_scan": StateFunction("mamba_ssm", _restarted_scan, _fla_mamba2),
}
