"""vLLM's support of a model: vLLM's own layers serve its architecture, vLLM's Transformers backend does, or neither.

The answer is known only when an engine is built. A refusal is stored, so that the next start fails early.
"""

import re
import traceback
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError
from rlctl.preflight.engines.vllm import architectures_in, keep_refusal

_BACKEND = "vllm.model_executor.models.transformers"
# Folder of vLLM's model classes.
_CLASSES = "/vllm/model_executor/models/"


def refusal(error: Exception, folder: str) -> ModelError | None:
    """Return an error of `LLMEngine.from_engine_args` as a ModelError of one line; None if it is not about the model's
    class."""
    import vllm

    if not re.search("Model architectures? .* (not supported|failed to be inspected)", str(error), re.DOTALL):
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, ValueError) or not any(_CLASSES in file for file in files):
            return None
        name = architectures_in(Path(folder) / "config.json")
        text = " ".join(str(error).split())
        reason = f"vLLM {vllm.__version__} does not build {name}: {type(error).__name__}: {text}"
        if lacking := re.search(r"Config' object has no attribute '(\w+)'", str(error)):
            reason += f"; it reads {lacking[1]} from config.json"
        return ModelError(f"{folder}: {reason}")
    name = architectures_in(Path(folder) / "config.json")
    if "failed to be inspected" in str(error):
        return ModelError(f"{folder}: vLLM {vllm.__version__} cannot import {name}; the engine's log says why")
    reason = f"vLLM {vllm.__version__} does not serve {name}, nor does its Transformers backend; a newer vLLM may"
    keep_refusal(name, reason)
    return ModelError(f"{folder}: {reason}")


def backend_note(llm: Any) -> str | None:
    """Return a note for the user if vLLM's Transformers backend serves the model, else None. llm: an `LLMEngine`."""
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    config = llm.model_config
    module_name = getattr(ModelRegistry.models.get(config.architecture), "module_name", "")
    if not module_name.startswith(_BACKEND):
        return None
    name = ", ".join(config.architectures)
    return f"vLLM {vllm.__version__} has no layers of its own for {name}: its Transformers backend serves it"
