"""Settings of a model's config.json that determine the shapes of its weights and the output of its layers."""

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError
from rlctl.config.json_files import read_object

# Keys of config.json that affect neither the shape of a weight nor the output of a layer.
_NOT_OF_THE_MODEL = re.compile(
    r"_.*|architectures|auto_map|transformers_version|(torch_)?dtype|use_cache|.*token_id|max_position_embeddings|"
    r".*dropout.*|initializer_.*|output_.*|return_dict.*|id2label|label2id|problem_type|quantization_config"
)


def settings_of(folder: Path) -> dict[str, Any]:
    """Return the settings of config.json that determine shapes and arithmetic; {} if the file cannot be read."""
    with suppress(ModelError):
        return dict(_settings(read_object(folder / "config.json")))
    return {}


def _settings(raw: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of a model's settings. Names of nested settings have a prefix.

    The text model's settings have none, so that they equal those of a text-only folder.
    """
    for key, value in raw.items():
        if _NOT_OF_THE_MODEL.fullmatch(key) or value is None:
            continue
        if isinstance(value, Mapping):
            # Newer folders have `rope_parameters`, older ones `rope_scaling` and `rope_theta`. Use the same names.
            prefixes = {"text_config": within, "rope_parameters": "rope ", "rope_scaling": "rope "}
            yield from _settings(value, prefixes.get(key, f"{within}{key}."))
        elif (within, key) == ("rope ", "rope_theta"):
            # The name in older folders, where it is no nested setting.
            yield key, value
        else:
            yield within + key, value
