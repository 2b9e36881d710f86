"""Loading of a model's tokenizer with transformers."""

from functools import lru_cache
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError, first_line
from rlctl.config.json_files import read_object
from rlctl.config.model_exceptions import model_exceptions
from rlctl.data.files import DataError
from rlctl.data.templates import require_named_templates
from rlctl.utils.process import fewer_collections

# File of a tokenizer in Mistral's format. transformers prefers it to other files.
MISTRAL = "tekken.json"


@lru_cache(maxsize=4)
def load_tokenizer(path: str) -> Any:
    """Load the Hugging Face tokenizer of a folder or hub name, once in a process. Raises DataError."""
    try:
        require_named_templates(Path(path))
        with fewer_collections():
            if is_general(Path(path)):
                from transformers import TokenizersBackend as Tokenizer
            else:
                from transformers import AutoTokenizer as Tokenizer
            tokenizer = Tokenizer.from_pretrained(path)
        # Some wrong values in the files raise only on use: an unknown unk_token looks itself up without end.
        tokenizer.decode(tokenizer("a").input_ids)
        assert {tokenizer.unk_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id}
        return tokenizer
    except ModuleNotFoundError:
        raise
    except BaseException as error:  # transformers raises many kinds of errors; tokenizers raises a Rust panic.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = first_line(error)
        if not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise DataError(f"{path}: no tokenizer can be read from its tokenizer files: {reason}") from error


def is_general(folder: Path) -> bool:
    """Return True if AutoTokenizer would load a local folder with the class `TokenizersBackend`.

    The import of this class alone needs no torch: 0.9 s of CPU instead of 2.7, in the driver and each agent's process.
    """
    try:
        settings = read_object(folder / "tokenizer_config.json")
        model = folder / "config.json"
        model_type = read_object(model).get("model_type", "") if model.exists() else ""
    except ModelError:
        return False
    if not isinstance(model_type, str) or "auto_map" in settings or (folder / MISTRAL).exists():
        return False
    is_backend = settings.get("tokenizer_class") == "TokenizersBackend"
    return is_backend and model_type not in model_exceptions("tokenizer_class")
