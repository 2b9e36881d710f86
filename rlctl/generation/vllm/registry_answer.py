"""The answer of vLLM's registry: it has an architecture's layers, its Transformers backend serves it, or nothing does.

The question is asked in an engine's process, by building the engine. A refusal is kept for the driver's next start.
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
    """Return an error of `LLMEngine.from_engine_args` as one line, if it is about the model's class."""
    import vllm

    if not re.search("Model architectures? .* (not supported|failed to be inspected)", str(error), re.DOTALL):
        where = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, ValueError) or not any(_CLASSES in each for each in where):
            return None
        name = architectures_in(Path(folder) / "config.json")
        why = f"vLLM {vllm.__version__} does not build {name}: {type(error).__name__}: {' '.join(str(error).split())}"
        lacking = re.search(r"Config' object has no attribute '(\w+)'", str(error))
        why += f"; it reads {lacking[1]} from config.json" if lacking else ""
        return ModelError(f"{folder}: {why}")
    name = architectures_in(Path(folder) / "config.json")
    if "failed to be inspected" in str(error):
        return ModelError(f"{folder}: vLLM {vllm.__version__} cannot import {name}; the engine's log says why")
    why = f"vLLM {vllm.__version__} does not serve {name}, nor does its Transformers backend; a newer vLLM may"
    keep_refusal(name, why)
    return ModelError(f"{folder}: {why}")


def backend_note(llm: Any) -> str | None:
    """Return a note for a person if vLLM's Transformers backend serves the model. llm: vLLM's `LLMEngine`."""
    import vllm
    from vllm.model_executor.models.registry import ModelRegistry

    config = llm.model_config
    found = getattr(ModelRegistry.models.get(config.architecture), "module_name", "")
    if not found.startswith(_BACKEND):
        return None
    name = ", ".join(config.architectures)
    return f"vLLM {vllm.__version__} has no layers of its own for {name}: its Transformers backend serves it"
