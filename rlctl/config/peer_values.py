"""Translation of values in another tool's config by the rules of `peer_keys.yaml`. Pure."""

import re
from dataclasses import dataclass
from itertools import chain
from typing import Any

from rlctl.config.peer_keys import PeerKey
from rlctl.config.provenance import ConfigNode, children, leaves, node_at, plain

# A reference `${...}` that contains no other reference.
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_PRODUCT = re.compile(r"mul:\s*([\d.]+)\s*,\s*([\d.]+)\s*")
_MAX_REFERENCES = 20
_FORMULA = "= "
_OTHER = "other"


class TranslationError(Exception):
    """A value cannot be computed from the file. The message is the reason."""


@dataclass(frozen=True)
class Translation:
    """Values of rlctl that result from one value of another tool."""

    # Dotted key of rlctl -> value; empty if nothing has to be set.
    values: dict[str, Any]
    # True if the rule has a case for exactly this value, as for a switch. Such a result wins over a copied value.
    is_exact_case: bool


def without_indices(key: str) -> str:
    """Return a dotted key without list indices, as in the rows."""
    return ".".join(word for word in key.split(".") if not word.isdecimal())


class PeerConfig:
    """Another tool's config. References are replaced when a value is read."""

    def __init__(self, root: ConfigNode) -> None:
        self.root = root
        self._leaves = [(without_indices(key), key, node) for key, node in leaves(root)]

    def value_of(self, key: str, node: ConfigNode) -> Any:
        """Return the plain value of a node. Raises TranslationError for a reference that cannot be resolved."""
        if isinstance(node.value, dict):
            return {name: self.value_of(f"{key}.{name}", child) for name, child in children(node).items()}
        if isinstance(node.value, list):
            return [self.value_of(f"{key}.{index}", child) for index, child in children(node).items()]
        if isinstance(node.value, str):
            return self._fill_in(node.value, key)
        return node.value

    def find(self, name: str) -> Any:
        """Return the value of the first key that equals `name` or ends in `.name`. Raises TranslationError."""
        for key, place, node in self._leaves:
            if f".{key}".endswith(f".{name}") and node.value is not None:
                return self.value_of(place, node)
        raise TranslationError(f"needs {name}, which is not in the file")

    def translate(self, peer: PeerKey, value: Any, keys: list[str]) -> Translation:
        """Translate the `value` of a peer's key to values of rlctl.

        keys: keys of the row that this kind of run has. Raises TranslationError.
        """
        rule = peer.rule
        if rule is None and peer.note:
            raise TranslationError(peer.note)
        # The rule has a template for each key of rlctl.
        if isinstance(rule, dict) and set(rule) <= set(peer.rlctl_keys):
            return Translation({key: self._fill_template(rule[key], value) for key in keys}, is_exact_case=False)
        is_exact_case = False
        result = f"{_FORMULA}value" if rule is None else rule
        # Any other mapping has a case for each value that it knows. A list is translated entry by entry.
        if isinstance(rule, dict) and isinstance(value, list) and value:
            result = list(chain.from_iterable(_find_case(peer, word) for word in value))
        elif isinstance(rule, dict):
            result = _find_case(peer, value)
            is_exact_case = _text_of(value) in _cases(rule)
        by_key = result if isinstance(result, dict) else dict.fromkeys(keys, result)
        values = {key: self._fill_template(template, value) for key, template in by_key.items()}
        return Translation(values, is_exact_case)

    def _fill_in(self, text: str, key: str) -> Any:
        """Return `text` with references replaced by values. A text that is a single reference becomes that value."""
        for _ in range(_MAX_REFERENCES):
            reference = _REFERENCE.search(text)
            if reference is None:
                return text
            value = self._referred_value(reference[1], key)
            if reference[0] == text and not isinstance(value, str):
                return value
            text = f"{text[: reference.start()]}{value}{text[reference.end() :]}"
        raise TranslationError(f"{text} refers to itself")

    def _referred_value(self, body: str, key: str) -> Any:
        if product := _PRODUCT.fullmatch(body):
            return _as_whole(float(product[1]) * float(product[2]))
        name = body.strip()
        if name.startswith("."):
            name = f"{key.rpartition('.')[0]}{name}"
        node = node_at(self.root, name.split("."))
        if node is None:
            raise TranslationError(f"${{{body}}} is a reference that the file alone does not fill in")
        return plain(node)

    def _fill_template(self, template: Any, value: Any) -> Any:
        """Return a rule's template with its formulas computed for `value`."""
        if isinstance(template, dict):
            return {name: self._fill_template(child, value) for name, child in template.items()}
        if isinstance(template, list):
            return [self._fill_template(child, value) for child in template]
        if isinstance(template, str) and template.startswith(_FORMULA):
            return self._compute(template.removeprefix(_FORMULA), value)
        return template

    def _compute(self, formula: str, value: Any) -> Any:
        words = formula.split()
        result = self._operand(words[0], value)
        for operator, word in zip(words[1::2], words[2::2]):
            operand = self._operand(word, value)
            if operator == ":":
                result = f"{result}:{operand}"
                continue
            for number in (result, operand):
                if isinstance(number, bool) or not isinstance(number, int | float):
                    raise TranslationError(f"{formula}: {number} is no number")
            result = _apply(operator, result, operand)
        return result

    def _operand(self, word: str, value: Any) -> Any:
        if word == "value":
            return value
        if word.isdecimal():
            return int(word)
        name, has_default, default = word.partition("|")
        try:
            return self.find(name)
        except TranslationError:
            if not has_default:
                raise
            return _as_whole(float(default))


def describe_rule(peer: PeerKey) -> str:
    """Return the formula of a row as text, for example "value / nnodes"; empty if the value is copied."""
    rules = [peer.rule, *peer.rule.values()] if isinstance(peer.rule, dict) else [peer.rule]
    formulas = [rule.removeprefix(_FORMULA) for rule in rules if isinstance(rule, str) and rule.startswith(_FORMULA)]
    return next((formula for formula in formulas if formula != "value"), "")


def _apply(operator: str, number: float, operand: float) -> float:
    if operator == "*":
        return _as_whole(number * operand)
    if operator == "-":
        return _as_whole(number - operand)
    if operand == 0:
        raise TranslationError(f"{number} / 0 is no number")
    return _as_whole(number / operand)


def _as_whole(number: float) -> float:
    return int(number) if float(number).is_integer() else number


def _text_of(value: Any) -> str:
    """Return a value as text in the form of a rule's cases."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _cases(rule: dict[Any, Any]) -> dict[str, Any]:
    return {_text_of(case): result for case, result in rule.items()}


def _find_case(peer: PeerKey, value: Any) -> Any:
    """Return the result of a rule's case for a value. Raises TranslationError if no case fits."""
    cases = _cases(peer.rule)
    text = _text_of(value)
    if text in cases:
        return cases[text]
    if _OTHER in cases:
        return cases[_OTHER]
    known_cases = ", ".join(cases)
    raise TranslationError(peer.note or f"rlctl knows an equal for {known_cases} alone")
