"""Layers that carry a state from token to token (gated delta, KDA, Mamba-2, short convolutions), in packs.

transformers calls a module-level function for each kind. `install_restarts` replaces it by one that begins with an
empty state at every sequence of a pack: on a GPU by flash-linear-attention's kernels, elsewhere in plain torch.
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
# A whole Mamba-2 layer: transformers asks it first, which from 5.20 on refuses packs without its package.
_FUSED = "mamba2_split_conv1d_scan_combined"
# Keywords that tell of packs. A batch of single sequences has none.
_PACKING = ("cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")


@dataclass(frozen=True)
class StateFunction:
    """A function of transformers' modules whose output at a token depends on earlier tokens."""

    # Package whose kernel transformers calls instead, where it is installed.
    package: str
    # Makes the reference of transformers, in plain torch, restart.
    make_restarting: Callable[[Function], Function]
    # flash-linear-attention's kernel with the signature of transformers' function and cu_seqlens. The kernel serves
    # where the package does not.
    kernel: Function | None = None
    # Index, among its arguments, of the tensor with the shape of its output, and its number of results.
    like: int = 0
    results: int = 1

    def empty_results(self, *args: Any) -> Any:
        """Return empty results of the function's shapes."""
        out = args[self.like].new_empty(args[self.like].shape)
        return (out, None) if self.results == 2 else out


def install_restarts(lm: Any) -> list[str]:
    """Make the state functions of a model's module restart at sequence boundaries. Return their names.

    Models of the module that are called without boundaries compute as before. Installing twice changes nothing.
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
    """Leave a layer to its single functions, as the fused one does without its package."""


@cache
def _has_scalar_gates() -> bool:
    """Return True if kernels with one gate a head have a backward pass here.

    flash-linear-attention refuses it on a Hopper GPU for Triton from 3.4.0 to below 3.7.1, which computes it wrongly.
    Kernels with a gate for every channel are right there: all channels of a head are given the same.
    """
    from fla.utils import IS_NVIDIA_HOPPER, TRITON_ABOVE_3_4_0, TRITON_ABOVE_3_7_1

    return not IS_NVIDIA_HOPPER or not TRITON_ABOVE_3_4_0 or TRITON_ABOVE_3_7_1


def _serves(function: "StateFunction") -> bool:
    """Return True if transformers' own choice of a kernel serves."""
    if not is_installed(function.package):
        return False
    return function.package != "fla" or function.kernel is None or _has_scalar_gates()


def _restart_function(original: Function, function: StateFunction) -> Function:
    """Return the function that transformers' own is replaced by."""
    # transformers wraps its plain torch form in the choice of a package's kernel.
    reference = inspect.unwrap(original)
    restarting_reference = function.make_restarting(reference)

    # Shapes depend on data here, which torch.compile cannot follow.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    @wraps(reference)
    def restarting(*args: Any, **keywords: Any) -> Any:
        ends = _boundaries(keywords)
        is_half = args[0].is_cuda and args[0].dtype in (torch.float16, torch.bfloat16)
        if is_half and _serves(function):
            if ends is not None and function.package == "fla":
                keywords["cu_seqlens"] = _long(ends)
            return original(*args, **keywords)
        unpacked_keywords = {name: argument for name, argument in keywords.items() if name not in _PACKING}
        if is_half and function.kernel is not None and has_kernels():
            return function.kernel(*args, cu_seqlens=None if ends is None else _long(ends), **unpacked_keywords)
        if ends is None or len(ends) == 2:
            return reference(*args, **unpacked_keywords)
        return restarting_reference(ends, *args, **unpacked_keywords)

    restarting.restarts = True
    return restarting  # type: ignore[no-any-return]


def _boundaries(keywords: dict[str, Any]) -> Tensor | None:
    """Return cu_seqlens of a call's keywords; None for a batch without packs."""
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        if keywords.get(name) is not None:
            return keywords[name]  # type: ignore[no-any-return]
    seq_idx = keywords.get("seq_idx")
    return None if seq_idx is None else _sequence_ends(seq_idx)


# All layers of a pack ask for the same tensors, and flash-linear-attention caches by the tensor.
@lru_cache(maxsize=2)
def _sequence_ends(seq_idx: Tensor) -> Tensor:
    """Return cu_seqlens, int32 [S + 1], of seq_idx, int32 [1, T]."""
    return F.pad(seq_idx[0].bincount().cumsum(0), (1, 0)).int()


@lru_cache(maxsize=2)
def _long(ends: Tensor) -> Tensor:
    return ends.long()


def _restarted_scan(reference: Function) -> Function:
    """Make a scan over dimension 1 restart: one batch for sequences whose lengths differ by a factor of at most two.

    Padding comes after the tokens, so no state that counts has seen it.
    """

    def scan(ends: Tensor, *args: Any, **keywords: Any) -> Any:
        tokens = args[0].shape[1]
        out: Tensor | None = None
        has_state = False
        for rows, is_real in length_groups(ends):
            readable_rows = rows.clamp(max=tokens - 1)

            def take_rows(argument: Any, readable_rows: Tensor = readable_rows) -> Any:
                """Take the rows of an argument that has a row for each token."""
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
    """Make a causal convolution restart: zeros between the sequences, as many as it looks back, in one call."""

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
    """Convolve by flash-linear-attention's Triton kernel. hidden: [1, channels, T]; weight: [channels, width]."""
    from fla.modules.causal_conv1d import causal_conv1d

    out: Tensor = causal_conv1d(
        x=hidden.transpose(1, 2).contiguous(), weight=weight, bias=bias, activation=activation, cu_seqlens=cu_seqlens
    )[0]
    return out.transpose(1, 2)


def _each_channel(gates: Tensor, width: int) -> Tensor:
    """Return float32 [1, T, heads, width] of gates [1, T, heads]."""
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
    """Compute the gated delta rule as Kimi's, with equal gates for all channels of a head.

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
    """Scan Mamba-2 as gated linear attention with one decay a head, exp(A dt): queries C, keys B, values dt x.

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


# By the name in transformers' modules.
FUNCTIONS = {
    "causal_conv1d_fn": StateFunction("causal_conv1d", _restarted_conv, _fla_conv),
    "torch_chunk_gated_delta_rule": StateFunction("fla", _restarted_scan, _fla_delta, like=2, results=2),
    "chunk_kimi_delta_attention": StateFunction("fla", _restarted_scan, like=2, results=2),
    "mamba2_chunk_scan": StateFunction("mamba_ssm", _restarted_scan, _fla_mamba2),
}
