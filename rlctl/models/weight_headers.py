"""Headers of a folder's safetensors: tensor names, dtypes, shapes. No torch, and no weight is read.

Quantised weights are refused, because rlctl does not apply their scales. They are recognized by tensor names and
dtypes, even if config.json does not mention them.
"""

import hashlib
import math
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError
from rlctl.config.json_files import parse_object, read_object

# Dtype in a header -> its name in torch.
DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16", "I64": "int64", "I32": "int32"}
# Dtype of safetensors 0.8 -> bits of an element.
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F4": 4,
}
# Most bytes of a header, safetensors' own limit.
_LONGEST_HEADER = 100_000_000
# Bytes of a file that its digest covers: at each end, and at each of 128 positions between. Both ends are not enough:
# they have embedding, norm and head, which merging an adapter does not change.
_END_BYTES = 1 << 20
_PLACE_BYTES = 64 << 10
_PLACES = 128
# Patterns of weight files with other names or formats.
_OTHERS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack")
_QUANTISED = re.compile(r"(.*\.)?(scales|qweight|qzeros|g_idx|weight_packed|SCB|absmax|quant_(map|state)(\..*)?)")
# Name of a quantisation scale, for example weight_scale_inv of weight, or proj_scales of proj_blocks. If the scaled
# tensor does not exist, it is an ordinary parameter of the model.
_SCALE = re.compile(r"(.*)_scale(_inv|_2|s)?")
_PLAIN = "use the checkpoint that it was quantised from (its name without -FP8, -AWQ or the like)"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors of a Hugging Face folder. Raises ModelError if one is missing, or the index is broken."""
    if re.search("[\ud800-\udfff]", str(folder)):
        raise ModelError(f"{folder} has a name that is not UTF-8, which safetensors does not open: rename the folder")
    index = folder / "model.safetensors.index.json"
    names = ["model.safetensors"]
    if index.exists():
        listed = read_object(index).get("weight_map")
        if not isinstance(listed, dict) or not all(isinstance(name, str) for name in listed.values()):
            raise ModelError(f"{index} is no index of weights: weight_map must give each tensor's file")
        names = sorted(set(listed.values()))
        if outside_names := [name for name in names if Path(name).name != name]:
            problem = f"lists {outside_names[0]}, which is outside its folder; allowed: names of files beside it"
            raise ModelError(f"{index} {problem}")
        if (folder / "model.safetensors").exists() and "model.safetensors" not in names:
            # transformers would read model.safetensors, and vLLM the files in the index.
            problem = f"has model.safetensors, and {index.name} lists other files"
            raise ModelError(f"{folder} {problem}: remove the one that is not the model")
    if missing := [name for name in names if not (folder / name).is_file()]:
        if index.exists():
            problem = f"{index.name} lists {missing[0]}: {len(missing)} of {len(names)} files are missing"
            raise ModelError(f"{folder}: {problem}; copy or download them again")
        raise ModelError(f"{folder} has no weights: {explain_no_weights(folder)}")
    return [folder / name for name in names]


def explain_no_weights(folder: Path) -> str:
    """Return why a folder has no weights, for a folder that has neither model.safetensors nor its index."""
    for pattern in _OTHERS:
        other = min((path.name for path in folder.glob(pattern)), default=None)
        if other is None:
            continue
        if other.endswith(".safetensors"):
            return f"{other} is there, but not named model.safetensors, nor listed in an index"
        advice = "weights are read from safetensors only; transformers' save_pretrained writes those"
        return f"{other} is there, but {advice}"
    return "it needs model.safetensors, or its index"


def check_weights(folder: Path) -> None:
    """Raise ModelError if a weight file is missing or truncated, or has a tensor of quantised weights."""
    headers = {file: file_header(file) for file in weight_files(folder)}
    # Names that may have a scale: the tensors' names, and these names up to their last underscore.
    scaled_names: set[str] = set()
    for header in headers.values():
        names = [name for name in header if not _SCALE.fullmatch(name)]
        scaled_names.update(names)
        scaled_names.update(name.rpartition("_")[0] for name in names)
    for file, header in headers.items():
        for name, tensor in header.items():
            dtype = str(tensor["dtype"])
            scale = _SCALE.fullmatch(name)
            if _QUANTISED.fullmatch(name) or (scale and scale[1] in scaled_names):
                raise ModelError(f"{file}: {name} belongs to quantised weights, which rlctl does not train; {_PLAIN}")
            if re.match(r"F[468]_|F8|F4", dtype) or (name.endswith(".weight") and re.match("[IU]", dtype)):
                raise ModelError(f"{file}: {name} is {dtype}: rlctl does not train quantised weights; {_PLAIN}")


def weight_headers(folder: Path) -> dict[str, tuple[str, list[int]]]:
    """Return tensor name -> (dtype in safetensors' notation, shape) for a folder. Raises ModelError."""
    headers: dict[str, tuple[str, list[int]]] = {}
    for file in weight_files(folder):
        for name, tensor in file_header(file).items():
            headers[name] = (str(tensor["dtype"]), list(tensor["shape"]))
    return headers


def digest_of_weights(folder: Path) -> str:
    """Return a digest of a folder's safetensors: file names, sizes, both ends, and 128 positions between.

    If a file is missing, the digest is that of no weights.
    """
    paths = list[Path]()
    with suppress(ModelError):
        paths = weight_files(folder)
    digest = hashlib.sha256()
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}".encode())
        places = [(0, _END_BYTES), (max(0, size - _END_BYTES), _END_BYTES)]
        places += [(size * number // (_PLACES + 1), _PLACE_BYTES) for number in range(1, _PLACES + 1)]
        with path.open("rb", buffering=0) as file:
            for place, count in places:
                file.seek(place)
                digest.update(file.read(count))
    return digest.hexdigest()


def file_header(file: Path) -> dict[str, Any]:
    """Return tensor name -> {dtype, shape, data_offsets}. Raises ModelError."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            text = stream.read(length) if 8 <= length + 8 <= size and length <= _LONGEST_HEADER else b""
    except OSError as error:
        raise ModelError(f"{file} cannot be read: {error.strerror}") from error
    if start == b"version ":
        raise ModelError(f"{file} is a Git LFS pointer, not the weights; get them: git lfs pull")
    if not text:
        raise ModelError(f"{file} is no safetensors file, or was cut short: {size:,} bytes")
    try:
        tensors = parse_object(text, f"the header of {file}")
    except ModelError as error:
        raise ModelError(f"{file} is no safetensors file: its header cannot be read: {error}") from error
    metadata = tensors.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ModelError(f"{file}: __metadata__ of its header must give texts")
    _check_places(file, tensors, size - 8 - length)
    return tensors


def _check_places(file: Path, tensors: dict[str, Any], nbytes: int) -> None:
    """Raise ModelError unless the tensors of a header fill the `nbytes` bytes after the header, without overlap and
    gap.
    """
    ends = []
    for name, tensor in tensors.items():
        place = f"{file}: {name} in its header"
        if not isinstance(tensor, dict) or not {"dtype", "shape", "data_offsets"} <= tensor.keys():
            raise ModelError(f"{place} must have dtype, shape and data_offsets")
        dtype = tensor["dtype"]
        shape = tensor["shape"]
        offsets = tensor["data_offsets"]
        if not isinstance(dtype, str) or dtype not in _BITS:
            raise ModelError(f"{place} has an unknown dtype; allowed: {', '.join(_BITS)}")
        for key, numbers in (("shape", shape), ("data_offsets", offsets)):
            if not isinstance(numbers, list) or not all(type(number) is int and number >= 0 for number in numbers):
                raise ModelError(f"{place} has no {key} of whole numbers, at least 0")
        if len(offsets) != 2 or (offsets[1] - offsets[0]) * 8 != math.prod(shape) * _BITS[dtype]:
            raise ModelError(f"{place} has data_offsets {offsets}, which are not those of {dtype} {shape}")
        ends.append((offsets[0], offsets[1], name))
    end = 0
    for begin, stop, name in sorted(ends):
        if begin != end:
            raise ModelError(f"{file}: {name} in its header begins at byte {begin:,}, where {end:,} is next")
        end = stop
    if end > nbytes:
        raise ModelError(f"{file} was cut short: {nbytes:,} of {end:,} bytes of weights; copy or download it again")
    if end < nbytes:
        raise ModelError(f"{file} has {nbytes - end:,} bytes behind its weights; copy or download it again")
