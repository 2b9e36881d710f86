"""Config sections of the engines: the keys of each, with meanings and limits. No engine is imported.

`configs/engine.yaml` has the defaults. Keys that all engines have are keys of `generation` itself.
"""

from dataclasses import dataclass
from typing import Literal

from rlctl.config.fields import spec
from rlctl.config.grpo_schema import EngineSection, UserEngineSection


@dataclass
class VllmSection(EngineSection):
    name: Literal["vllm"] = spec("The engine vLLM, in the process of its actor.")
    fast_path: Literal["auto", "off"] = spec(
        "auto shortens vLLM's steps in versions that the shortened ones were compared with bit by bit, and says where "
        "it does not. off leaves them as they are."
    )
    enforce_eager: bool | None = spec("Run engines without CUDA graphs. null is true on a CPU and false on GPUs.")


AnyEngineSection = VllmSection | UserEngineSection
