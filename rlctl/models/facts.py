"""Facts of a model as plain data, derived once from its folder and kept. No torch.

`derive.py` derives them in a separate process: from config.json, the headers of the weights, and transformers' class
on the meta device. They are kept below rlctl's cache folder, under a digest of all that they depend on.
"""

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError
from rlctl.models.layer_kinds import AttentionKind, LayerKinds, LinearLayer, LogitTransform, StateKind
from rlctl.models.weight_headers import weight_headers
from rlctl.utils.code_cache import cache_root
from rlctl.utils.files import write_whole
from rlctl.utils.process import run_module

# Modules that determine the facts and their form.
_DERIVING = (
    "facts",
    "derive",
    "layer_kinds",
    "observed_facts",
    "parameter_table",
    "meta_model",
    "packed_attention",
    "grouped_experts",
    "state_layers",
)


@dataclass(frozen=True)
class RowBytes:
    """Bytes that all layers keep for the backward pass if each sequence has a row."""

    dtype: str
    # A token's.
    token: int
    # A pair of tokens: attention scores, where transformers' attention keeps them.
    pair: int


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder. Parameter counts are numbers, not bytes."""

    model_type: str
    hidden: int
    layers: int
    # Largest of all layers.
    heads: int
    kv_heads: int
    head_dim: int
    # MLP of a dense layer, as config.json has it; 0 without one.
    intermediate: int
    # Gate and up, each, that one token passes through in the widest layer.
    mlp_width: int
    vocab: int
    max_positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    # Norms of the heads' q and k.
    qk_norm: bool
    experts: int
    experts_per_token: int
    # Rows of one expert's gate.
    expert_intermediate: int
    # True if the chosen experts' weights are made to add up to 1.
    norm_topk_prob: bool
    # Layers whose MLP is a mixture of experts.
    sparse_layers: int
    activation: str
    # All parameters; tied embeddings once.
    parameters: int
    # Parameters that a token is multiplied with: its own experts alone, and of the embeddings the output.
    active_parameters: int
    # Parameters of all layers' experts, without their routers.
    expert_parameters: int
    # Parameters of the largest layer, which FSDP gathers at a time.
    largest_layer: int
    # Parameters of the input embedding; the output has the same number unless tied.
    embedding_parameters: int
    # Numbers that the key-value cache holds for one token, over all layers.
    kv_values_per_token: int
    # All linear layers of the layers, in their order.
    linears: tuple[LinearLayer, ...]
    # Layers that carry a state from token to token.
    state_layers: int
    # Reason why a micro-batch has a row for each sequence, padded; None: sequences are packed.
    one_sequence_a_row: str | None
    # Keys of config.json with a rate of dropout, which training sets to 0.
    dropout: tuple[str, ...]
    # One for each compute dtype; empty where sequences are packed.
    row_bytes: tuple[RowBytes, ...] = ()


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model's text part before it is built. Module paths are those of transformers."""

    causal_lm: str
    decoder: str
    # The one container of all layers.
    layers: str
    embedding: str
    head: str
    head_bias: bool
    kinds: LayerKinds
    # Parts of names that transformers keeps in float32 (`_keep_in_fp32_modules_strict`).
    float32: tuple[str, ...]
    # Buffers on disk, which a refit sends and training leaves alone.
    buffers: tuple[str, ...]
    # Tensors on disk that the text model does not hold. An export copies them.
    kept: tuple[str, ...]
    sizes: ModelSizes

    @property
    def attention(self) -> tuple[tuple[float, int | None], ...]:
        """Heads times head size, and window, of each attention; see `throughput.TrainingFlops`."""
        return tuple((kind.heads * (kind.dim + kind.v_dim) / 2, kind.window) for kind in self.kinds.attention)

    def keeps_float32(self, name: str) -> bool:
        """Return True for a parameter or buffer that is computed in float32 whatever the compute dtype."""
        return any(part in name for part in self.float32)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "ModelFacts":
        """Return the facts that `to_json` wrote. Raises KeyError or TypeError for anything else."""
        fields = dict(raw)
        for key in ("float32", "buffers", "kept"):
            fields[key] = tuple(raw[key])
        fields["kinds"] = _kinds_from_json(raw["kinds"])
        fields["sizes"] = _sizes_from_json(raw["sizes"])
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)


def _sizes_from_json(raw: Mapping[str, Any]) -> ModelSizes:
    fields = dict(raw)
    fields["linears"] = tuple(LinearLayer(**linear) for linear in raw["linears"])
    fields["dropout"] = tuple(raw["dropout"])
    fields["row_bytes"] = tuple(RowBytes(**row_bytes) for row_bytes in raw["row_bytes"])
    return ModelSizes(**fields)


def _kinds_from_json(raw: Mapping[str, Any]) -> LayerKinds:
    fields = dict(raw)
    fields["logits"] = LogitTransform(**raw["logits"])
    fields["attention"] = tuple(AttentionKind(**kind) for kind in raw["attention"])
    fields["states"] = tuple(StateKind(kind["layer"], tuple(kind["functions"])) for kind in raw["states"])
    fields["dropout"] = tuple((key, rate) for key, rate in raw["dropout"])
    return LayerKinds(**fields)


def known_facts(folder: Path) -> ModelFacts | None:
    """Return the facts of a Hugging Face folder if they were derived before, of its weights or of its config alone."""
    for weights in (True, False):
        with suppress(OSError, ValueError, KeyError, TypeError, ModelError):
            return ModelFacts.from_json(json.loads(facts_file(folder, weights).read_text()))
    return None


def find_facts(folder: Path) -> ModelFacts:
    """Return the facts of a Hugging Face folder; derive new ones in a separate process, 3 to 5 s.

    A folder without weights has facts too. Raises ModelError for a model that rlctl cannot train.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        return ModelFacts.from_json(json.loads(facts_file(folder).read_text()))
    return derive_apart(folder)


def derive_apart(folder: Path) -> ModelFacts:
    """Derive the facts of a folder in a separate process, which keeps them.

    Raises ModelError, and ModuleNotFoundError for a package that is not installed.
    """
    process = run_module("rlctl.models.derive", str(folder))
    try:
        answer = json.loads(process.stdout.splitlines()[-1])
    except (ValueError, IndexError):
        lines = process.stderr.strip().splitlines()
        reason = lines[-1] if lines else f"exit code {process.returncode}"
        raise RuntimeError(f"no facts of {folder}: {reason}") from None
    if "error" in answer:
        raise ModelError(answer["error"])
    return ModelFacts.from_json(answer)


def keep_facts(folder: Path, facts: ModelFacts) -> None:
    """Write the facts where the next process finds them. A cache that cannot be written costs the next one seconds."""
    with suppress(OSError):
        file = facts_file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(facts.to_json()))


def facts_file(folder: Path, weights: bool = True) -> Path:
    """Return the file of a folder's facts. weights: they depend on the headers of its weights, where it has any.

    Raises ModelError for weights that are cut short, OSError without a config.json.
    """
    digest = hashlib.sha256(_derivation().encode())
    digest.update((folder / "config.json").read_bytes())
    if weights and has_weights(folder):
        headers = weight_headers(folder)
        rows = sorted([name, dtype, shape] for name, (dtype, shape) in headers.items())
        digest.update(json.dumps(rows).encode())
    return cache_root() / "facts" / f"{digest.hexdigest()[:32]}.json"


def has_weights(folder: Path) -> bool:
    """Return True if a Hugging Face folder has safetensors."""
    return any(os.path.exists(folder / name) for name in ("model.safetensors", "model.safetensors.index.json"))


@cache
def _derivation() -> str:
    """Return the release of transformers and the digest of the deriving modules."""
    try:
        release = version("transformers")
    except PackageNotFoundError:
        release = "none"
    code = hashlib.sha256(b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _DERIVING))
    return f"{release} {code.hexdigest()}"
