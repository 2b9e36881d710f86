"""Facts of a model as plain data, derived once from its folder and cached. No torch.

`derive.py` derives the facts in a separate process, from config.json, the headers of the weights, and transformers'
class on the meta device. They are cached in rlctl's cache folder, under a digest of all inputs.
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
from typing import Any, Literal

from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object
from rlctl.models.layer_kinds import AttentionKind, LayerKinds, LinearLayer, LogitTransform, StateKind
from rlctl.models.weight_headers import weight_headers
from rlctl.utils.code_cache import cache_root
from rlctl.utils.files import write_whole
from rlctl.utils.process import run_module

# Output head of a model: logits over the vocabulary (causal), or one number a token (value).
HeadKind = Literal["causal", "value"]
# Endings of the names of transformers' classes whose head has one output for each label. Such a model with one label
# has a value head.
_LABEL_CLASSES = ("ForTokenClassification", "ForSequenceClassification")
# Modules on whose code the facts depend.
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
    """Bytes that all layers keep for the backward pass if a micro-batch has a padded row for each sequence."""

    dtype: str
    # Bytes per token.
    token: int
    # Bytes per pair of tokens of a row: attention scores, if transformers' attention keeps them.
    pair: int


@dataclass(frozen=True)
class ModelSizes:
    """Sizes of a decoder. Parameter counts are numbers of elements, not bytes."""

    model_type: str
    hidden: int
    layers: int
    # The next three are the largest values of all layers.
    heads: int
    kv_heads: int
    head_dim: int
    # MLP width of a dense layer by config.json; 0 without one.
    intermediate: int
    # MLP width of one token in the widest layer: rows of gate, and as many of up, of all its experts and dense MLPs.
    mlp_width: int
    vocab: int
    max_positions: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    # True if q and k of each head have norms.
    qk_norm: bool
    experts: int
    experts_per_token: int
    # Rows of one expert's gate matrix.
    expert_intermediate: int
    # True if the router normalizes the weights of the chosen experts to a sum of 1.
    norm_topk_prob: bool
    # Number of layers whose MLP is a mixture of experts.
    sparse_layers: int
    activation: str
    # All parameters; tied embeddings count once.
    parameters: int
    # Parameters that one token uses in matrix products: those of its experts, and of the embeddings only the output's.
    active_parameters: int
    # Parameters of all layers' experts, without their routers.
    expert_parameters: int
    # Parameters of the largest layer. FSDP gathers a layer at a time.
    largest_layer: int
    # Parameters of the input embedding; the output has the same number unless tied.
    embedding_parameters: int
    # Number of elements in the key-value cache per token, over all layers.
    kv_values_per_token: int
    # All linear layers inside the decoder's layers, in order.
    linears: tuple[LinearLayer, ...]
    # Number of layers that carry a state from token to token, for example Mamba-2.
    state_layers: int
    # Reason why sequences cannot be packed, so that a micro-batch has a padded row for each; None: they are packed.
    one_sequence_a_row: str | None
    # Keys of config.json with a dropout rate above 0. Training sets them to 0.
    dropout: tuple[str, ...]
    # One entry per compute dtype; empty if sequences are packed.
    row_bytes: tuple[RowBytes, ...] = ()
    head_kind: HeadKind = "causal"

    @property
    def head_outputs(self) -> int:
        """Number of outputs of the head for one token."""
        return self.vocab if self.head_kind == "causal" else 1

    @property
    def head_parameters(self) -> int:
        """Number of elements of the head's weight, also if it is tied to the embedding."""
        return self.embedding_parameters if self.head_kind == "causal" else self.hidden

    @property
    def outer_parameters(self) -> int:
        """Number of elements of embedding and head together. A tied head is counted with the embedding."""
        return self.embedding_parameters + (0 if self.tied else self.head_parameters)


@dataclass(frozen=True)
class ModelFacts:
    """Facts of a model's text part, known before the model is built. Module paths are transformers'."""

    # Name of transformers' class.
    architecture: str
    decoder: str
    # Path of the list of all layers.
    layers: str
    embedding: str
    head: str
    head_bias: bool
    kinds: LayerKinds
    # Parts of module names whose tensors transformers keeps in float32 (`_keep_in_fp32_modules_strict`).
    float32: tuple[str, ...]
    # Buffers with a tensor on disk. A refit sends them; training does not change them.
    buffers: tuple[str, ...]
    # Names of tensors on disk that are no part of the text model. An export copies them.
    kept: tuple[str, ...]
    sizes: ModelSizes

    @property
    def attention(self) -> tuple[tuple[float, int | None], ...]:
        """(heads times head size, window) of each attention layer, for `throughput.TrainingFlops`."""
        return tuple((kind.heads * (kind.dim + kind.v_dim) / 2, kind.window) for kind in self.kinds.attention)

    def keeps_float32(self, name: str) -> bool:
        """Return True for a parameter or buffer that stays float32 with every compute dtype."""
        return any(part in name for part in self.float32)

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> "ModelFacts":
        """Return the facts from values of `to_json`. Raises KeyError or TypeError for other values."""
        fields = dict(raw)
        for key in ("float32", "buffers", "kept"):
            fields[key] = tuple(raw[key])
        fields["kinds"] = _kinds_from_json(raw["kinds"])
        fields["sizes"] = _sizes_from_json(raw["sizes"])
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return the facts as plain values for JSON."""
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
    """Return the cached facts of a Hugging Face folder, derived with its weights or with its config alone; None if
    there are none.
    """
    for weights in (True, False):
        with suppress(OSError, ValueError, KeyError, TypeError, ModelError):
            return ModelFacts.from_json(json.loads(facts_file(folder, weights).read_text()))
    return None


def find_facts(folder: Path) -> ModelFacts:
    """Return the facts of a Hugging Face folder, from the cache or derived in a separate process (3 to 5 s).

    A folder without weights has facts too. Raises ModelError for a model that rlctl cannot train.
    """
    with suppress(OSError, ValueError, KeyError, TypeError):
        return ModelFacts.from_json(json.loads(facts_file(folder).read_text()))
    return derive_apart(folder)


def derive_apart(folder: Path) -> ModelFacts:
    """Derive the facts of a folder in a separate process, which caches them.

    Raises ModelError for a model that rlctl cannot train, and ModuleNotFoundError for a missing package.
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
    """Write the facts to the cache. If the cache cannot be written, the next process derives them again."""
    with suppress(OSError):
        file = facts_file(folder)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(facts.to_json()))


def facts_file(folder: Path, weights: bool = True) -> Path:
    """Return the cache file of a folder's facts. weights: the digest covers the headers of its weights, if it has any.

    Raises ModelError for truncated weights, OSError without a config.json.
    """
    digest = hashlib.sha256(_derivation().encode())
    digest.update((folder / "config.json").read_bytes())
    if weights and has_weights(folder):
        headers = weight_headers(folder)
        rows = sorted([name, dtype, shape] for name, (dtype, shape) in headers.items())
        digest.update(json.dumps(rows).encode())
    return cache_root() / "facts" / f"{digest.hexdigest()[:32]}.json"


def head_kind(folder: Path) -> HeadKind:
    """Return the kind of head that the architectures of a folder's config.json name.

    Raises ModelError for a classifier with several labels.
    """
    raw = read_object(folder / "config.json")
    names = raw.get("architectures")
    # Anything but a list is the problem of the check of the folder.
    names = names if isinstance(names, list) else []
    name = next((str(name) for name in names if str(name).endswith(_LABEL_CLASSES)), None)
    if name is None:
        return "causal"
    labels = raw.get("num_labels") or len(raw.get("id2label") or (0, 1))
    if labels != 1:
        raise ModelError(f"{folder}: {name} has {labels} labels; a value head has one (num_labels 1 in config.json)")
    return "value"


def head_problem(folder: Path, needed: HeadKind) -> str | None:
    """Return the problem of a folder whose head is of another kind than needed; None without one. Raises ModelError."""
    if head_kind(folder) == needed:
        return None
    names = ", ".join(map(str, read_object(folder / "config.json").get("architectures") or ("no architectures",)))
    if needed == "causal":
        return f"{folder} has a value head ({names}): it values tokens and predicts none; needed: a causal LM"
    return f"{folder} has no value head ({names}); needed: a token or sequence classifier with num_labels 1"


def has_weights(folder: Path) -> bool:
    """Return True if a Hugging Face folder has safetensors."""
    return any(os.path.exists(folder / name) for name in ("model.safetensors", "model.safetensors.index.json"))


@cache
def _derivation() -> str:
    """Return the version of transformers and a digest of the modules in `_DERIVING`."""
    try:
        release = version("transformers")
    except PackageNotFoundError:
        release = "none"
    code = hashlib.sha256(b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _DERIVING))
    return f"{release} {code.hexdigest()}"
