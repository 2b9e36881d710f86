"""Chat templates as Jinja source: the choice of a template, and the arguments that it takes."""

import json
import re
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from rlctl.config.errors import ModelError, did_you_mean
from rlctl.config.json_files import read_object
from rlctl.config.run_weights import chat_folder
from rlctl.config.schema import RunConfig
from rlctl.data.files import DataError

# Jinja source, or several sources by name, for a tokenizer with several templates.
Template = str | Mapping[str, str]

_DEFAULT = "default"
_WITH_TOOLS = "tool_use"
# Files of a tokenizer's folder that hold templates, and the subfolder of further templates.
_FILE = "chat_template.jinja"
_FURTHER = "additional_chat_templates"
_CONFIG = "tokenizer_config.json"
# Names in a template that are no arguments of the user: variables that rlctl and the tokenizer set, functions of
# transformers, and parameters of its `apply_chat_template`.
_FILLED = {
    *("messages", "tools", "add_generation_prompt", "continue_final_message", "raise_exception", "strftime_now"),
    *("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"),
    *("additional_special_tokens", "conversation", "chat_template", "tokenize", "padding", "truncation", "max_length"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
}
# Block tag of transformers, which plain Jinja does not know.
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")


def find_template(name: str, tokenizer: Any) -> Template | None:
    """Return the template that `data.chat_template` names; None if there is none. Raises DataError."""
    if name == "none":
        return None
    if name == "auto":
        template = tokenizer.chat_template
        sources = template.values() if isinstance(template, Mapping) else [template or ""]
        if not all(isinstance(source, str) for source in sources):
            problem = "the tokenizer's chat_template is no text, nor texts by name; set data.chat_template"
            raise DataError(f"{tokenizer.name_or_path}: {problem}")
        return template  # type: ignore[no-any-return]
    if Path(name).is_file():
        return Path(name).read_text(encoding="utf-8")
    raise DataError(f"data.chat_template: {name}: no such file (or auto, none)")


def require_named_templates(folder: Path) -> None:
    """Raise DataError for a list of templates without names, because transformers' own error does not say the cause."""
    with suppress(ModelError):
        templates = read_object(folder / _CONFIG).get("chat_template")
        if isinstance(templates, list) and not all(
            isinstance(template, dict) and {"name", "template"} <= template.keys() for template in templates
        ):
            raise DataError(f"{_CONFIG}: chat_template must be text, or a list of {{name: ..., template: ...}}")


def choose_template(template: Template, *, with_tools: bool) -> str:
    """Return the source that transformers would choose for a chat with or without tools.

    Raises DataError if there is no such source.
    """
    if isinstance(template, str):
        return template
    if with_tools and _WITH_TOOLS in template:
        return template[_WITH_TOOLS]
    if _DEFAULT in template:
        return template[_DEFAULT]
    names = ", ".join(sorted(template))
    raise DataError(f"the tokenizer has the chat templates {names}, and none named default; set data.chat_template")


def read_templates(folder: Path) -> dict[str, str]:
    """Return the templates of a tokenizer's folder by name, read from its files; empty if none can be read."""
    files = {_DEFAULT: folder / _FILE}
    files |= {file.stem: file for file in (folder / _FURTHER).glob("*.jinja")}
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
        if sources := {name: file.read_text(encoding="utf-8") for name, file in files.items() if file.is_file()}:
            return sources
        template = read_object(folder / _CONFIG).get("chat_template")
        if isinstance(template, list):
            template = {source["name"]: source["template"] for source in template}
        by_name = template if isinstance(template, dict) else {_DEFAULT: template}
        return {str(name): source for name, source in by_name.items() if isinstance(source, str)}
    return {}


def templates_of(config: RunConfig) -> dict[str, str]:
    """Return the templates of a config by name, read from files; empty if none can be read."""
    choice = config.data.chat_template
    if choice == "auto":
        return read_templates(Path(config.model.tokenizer or chat_folder(config.model.path)))
    with suppress(OSError, ValueError):
        return {} if choice == "none" else {_DEFAULT: Path(choice).read_text(encoding="utf-8")}
    return {}


def unknown_arguments(names: Collection[str], template: Template) -> dict[str, str]:
    """Return each name that is no argument of the template, with the reason.

    If a source cannot be parsed, every name counts as an argument, except those in `_FILLED`.
    """
    arguments = set[str]()
    is_readable = True
    for source in [template] if isinstance(template, str) else template.values():
        variables = _find_variables(source)
        is_readable = is_readable and variables is not None
        arguments |= (variables or set()) - _FILLED
    takes = f", which takes {', '.join(sorted(arguments))}" if arguments else ""
    return {
        name: f"is no argument of the chat template{takes}{did_you_mean(name, arguments)}"
        for name in names
        if name not in arguments and (is_readable or name in _FILLED)
    }


def write_arguments(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Write arguments into the templates of a tokenizer's folder, as defaults for every program that uses them."""
    # The head ends with a line break, because Jinja strips blanks before a block only at the beginning of a line.
    head = "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {_write_literal(value)} %}}{{%- endif %}}\n"
        for name, value in arguments.items()
    )
    for file in [folder / _FILE, *(folder / _FURTHER).glob("*.jinja")]:
        if file.is_file():
            file.write_text(head + file.read_text(encoding="utf-8"), encoding="utf-8")
    config = folder / _CONFIG
    facts = read_object(config) if config.is_file() else {}
    template = facts.get("chat_template")
    if isinstance(template, str):
        facts["chat_template"] = head + template
    elif isinstance(template, list):
        facts["chat_template"] = [{**source, "template": head + source["template"]} for source in template]
    else:
        return
    config.write_text(json.dumps(facts, indent=2, ensure_ascii=False), encoding="utf-8")


def _write_literal(value: Any) -> str:
    """Return JSON-like data as a Jinja literal. Jinja writes null as `none`."""
    if isinstance(value, Mapping):
        entries = (f"{_write_literal(name)}: {_write_literal(entry)}" for name, entry in value.items())
        return "{" + ", ".join(entries) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_write_literal, value)) + "]"
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


@lru_cache(maxsize=16)
def _find_variables(source: str) -> frozenset[str] | None:
    """Return the undefined variables that a template uses; None if plain Jinja cannot parse it."""
    import jinja2.ext
    import jinja2.meta
    import jinja2.sandbox

    reader = jinja2.sandbox.ImmutableSandboxedEnvironment(extensions=[jinja2.ext.loopcontrols])
    try:
        return frozenset(jinja2.meta.find_undeclared_variables(reader.parse(_GENERATION.sub("", source))))
    except (jinja2.TemplateError, RecursionError):
        return None
