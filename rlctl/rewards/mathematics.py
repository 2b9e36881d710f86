"""Comparison of two formulas in LaTeX, with the library math-verify on SymPy. Large formulas are refused.

The library reads LaTeX, and compares equations and sets. Numbers, lists and expressions are compared here, because the
library rounds to six decimals (1e-9 would equal 2e-9) and its `simplify` may take minutes.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import sympy
from math_verify import LatexExtractionConfig, LatexNormalizationConfig, parse, verify
from math_verify.grader import is_assignment_relation, is_equation, is_relation, take_first_relation, take_last_relation
from sympy import (
    Derivative,
    Expr,
    FiniteSet,
    Float,
    Integer,
    Integral,
    Interval,
    Limit,
    MatrixBase,
    Mul,
    Product,
    Rational,
    Sum,
    Tuple,
    UnevaluatedExpr,
    oo,
)

from rlctl.rewards.answer_reading import Reference, has_words, plain_signs, read_choice, read_formula, read_reference
from rlctl.rewards.final_answer import FinalAnswer, find_answers
from rlctl.utils.user_code import shorten_text

# Bounds of a formula that is read. The library takes about 20 ms for a token and 0.4 s for a level of brackets.
_MOST_TOKENS = 150
_MOST_LEVELS = 6
# Most decimal digits of a number that is evaluated.
_MOST_DIGITS = 10_000
# Most terms of a sum or product that is evaluated, unless it sums a small polynomial.
_MOST_TERMS = 500
# Largest polynomial, by `_digits`, whose sum is evaluated with any number of terms.
_LARGEST_POLYNOMIAL = 100
# A binomial of a large number is refused, because the library evaluates binomials while it reads them. A number of five
# digits, a power or a factorial is large.
_BINOMIAL = re.compile(r"\\[dt]?binom\s*(\{(?:[^{}]|\{[^{}]*\})*\})?|\\choose")
_LARGE = re.compile(r"\d{5}|[!^]")
_TOKEN = re.compile(r"\\?[A-Za-z]+|\d+|\S")
_PLAIN_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
# The innermost brackets; an interval may have different ones.
_BRACKETED = re.compile(r"[(\[{][^()\[\]{}]*[)\]}]")
_DOTS = re.compile(r"\\[lcd]?dots(?:[cbmio])?(?![A-Za-z])|\.\.\.")
_UNSEEN = re.compile(r"\\(?:left|right)(?![A-Za-z])|\s+")
# Without units: `answer_reading.py` removes units, and the library would take the t of 3t as a unit.
_READING = LatexExtractionConfig(
    normalization_config=LatexNormalizationConfig(
        basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="last", equations=False
    )
)
# Values for variables, of both signs. Two expressions are compared at the points where both are real, at least three.
_FRACTIONS = ((17, 7), (5, 11), (-13, 9), (29, 8), (-4, 7), (31, 3), (-37, 5), (3, 23))
_VALUES = [Rational(numerator, denominator) for numerator, denominator in _FRACTIONS]
_ENOUGH_POINTS = 3
# A smaller difference of exact numbers, absolute or relative, is an error of their evaluation.
_LEAST = Float("1e-100")


def is_right(reference: Reference, completion: str, prompt: str = "") -> bool:
    """Return True if the final answer of a completion equals the reference. prompt: the text before the completion."""
    is_list = reference.kind != "choice" and _is_list(reference.text)
    for final_answer in find_answers(plain_signs(completion), prompt, is_list=is_list):
        verdict = _judge_answer(reference, final_answer)
        if verdict is not None:
            return verdict
    return False


def _is_list(text: str) -> bool:
    """Return True if a text has a comma outside of brackets that separates no thousands."""
    text = _THOUSANDS.sub("", text)
    while (outside := _BRACKETED.sub("", text)) != text:
        text = outside
    return "," in text


def describe_references(answers: Sequence[tuple[str, str]]) -> list[str]:
    """Return one line for each kind of reference answer, with its count and an example. answers: (row, answer)."""
    examples: dict[str, list[str]] = {}
    for row, answer in answers:
        kind, text = _describe(read_reference(answer))
        examples.setdefault(kind, []).append(f"{row}, {shorten_text(repr(answer))}{text}")
    return [
        f"math_verify reads {len(rows)} of {len(answers)} answers as {kind}: {rows[0]}"
        for kind, rows in examples.items()
    ]


def _describe(reference: Reference | None) -> tuple[str, str]:
    """Return a reference's kind in words, and a text that says how it is read."""
    if reference is None:
        return "nothing, so that their rollouts fail", ""
    if reference.kind == "choice":
        return "a choice", f", is {reference.text}"
    if reference.kind == "words":
        return "words", f", is {reference.text!r}"
    if read_latex(reference.text) is None:
        return "a text, right if it is equal: no formula that can be read", ""
    return "mathematics", f", is {reference.text}"


def _judge_answer(reference: Reference, final_answer: FinalAnswer) -> bool | None:
    """Return True if an answer equals the reference; None if it states nothing of the reference's kind."""
    if reference.kind == "choice":
        choice = read_choice(final_answer)
        if choice is None:
            return _judge_answer(reference.label, final_answer) if reference.label else None
        letter, label = choice
        if letter == reference.text and label and reference.label:
            # A name such as "E. coli" may begin like a choice, so the text behind the letter is compared too.
            return _judge_answer(reference.label, FinalAnswer(label, "statement")) is not False
        return letter == reference.text
    if reference.kind == "words":
        return has_words(final_answer, reference.text)
    formula = read_formula(final_answer, reference.text)
    return None if formula is None else equal_formulas(reference.text, formula, is_prose=reference.is_prose)


def equal_formulas(gold: str, answer: str, *, is_prose: bool = False) -> bool:
    """Return True if two formulas are equal.

    is_prose: `gold` is from a written solution, so for `x^2 = 9` the answer 9 is right too.
    """
    if _UNSEEN.sub("", gold) == _UNSEEN.sub("", answer):
        return True
    if _DOTS.search(gold) or _DOTS.search(answer):
        gold_parts = _DOTS.sub("...", gold).split(",")
        answer_parts = _DOTS.sub("...", answer).split(",")
        is_list = len(gold_parts) == len(answer_parts) > 1
        return is_list and all(map(_equal_parts, gold_parts, answer_parts))
    gold_value = read_latex(gold)
    answer_value = read_latex(answer)
    if gold_value is None or answer_value is None:
        return False
    try:
        if _are_equal(gold_value, answer_value):
            return True
        return is_prose and _states_value(gold_value) and _are_equal(gold_value.rhs, answer_value)
    except Exception:  # SymPy raises for NaN and for deep sums
        return False


@lru_cache(maxsize=512)
def read_latex(formula: str) -> Any | None:
    """Return the SymPy object of a formula; None if the text is no formula, too long, or nested too deep."""
    if _PLAIN_NUMBER.fullmatch(formula) and formula[-1:].isdigit():
        digits = formula.replace(",", "")
        if len(digits) > _MOST_DIGITS // 10:
            return None
        return Float(digits) if "." in digits else Integer(digits)
    if len(_TOKEN.findall(formula)) > _MOST_TOKENS or _levels(formula) > _MOST_LEVELS:
        return None
    # The group is the upper number of a binomial. `\choose` has no group, so the whole formula is searched.
    if any(_LARGE.search(binomial[1] or formula) for binomial in _BINOMIAL.finditer(formula)):
        return None
    expressions = parse(f"\\boxed{{{formula}}}", [_READING], fallback_mode="no_fallback", parsing_timeout=None)
    return expressions[0] if expressions else None


def _levels(formula: str) -> int:
    """Return the depth of nested brackets. Braces of LaTeX groups do not count, because they are quick to read."""
    depth = deepest = 0
    for sign in re.findall(r"\\[{}]|[()\[\]]", formula):
        depth += 1 if sign in ("(", "[", r"\{") else -1
        deepest = max(deepest, depth)
    return deepest


def _equal_parts(gold: str, answer: str) -> bool:
    """Return True if two members of lists with dots are equal. A member with dots equals only the same text."""
    if "..." in gold or "..." in answer:
        return gold.strip() == answer.strip()
    return equal_formulas(gold, answer)


def _states_value(relation: Any) -> bool:
    """Return True for an equation with at most one unknown and a right side that is a number other than 0."""
    if not is_equation(relation) or not hasattr(relation, "rhs"):
        return False
    return len(relation.lhs.free_symbols) < 2 and relation.rhs.is_nonzero


def _are_equal(gold: Any, answer: Any) -> bool:
    """Return True if two objects of SymPy are equal.

    If only one is an equation, its right side is compared with the other, for example x = 5 with 5.
    """
    if is_assignment_relation(gold) and is_assignment_relation(answer):
        if take_first_relation(gold).lhs != take_first_relation(answer).lhs:
            return False
        gold = take_last_relation(gold).rhs
        answer = take_last_relation(answer).rhs
    elif is_equation(answer) and not is_equation(gold):
        last = take_last_relation(answer)
        # The 0 of `x + y = 0` is no answer, so this equation is compared as a whole.
        is_implicit = last.rhs == 0 and last.lhs.free_symbols and not is_assignment_relation(answer)
        answer = answer if is_implicit else last.rhs
    elif is_assignment_relation(gold) and not is_equation(answer):
        gold = take_last_relation(gold).rhs
    if gold.has(sympy.zoo, sympy.nan) or answer.has(sympy.zoo, sympy.nan):
        return False
    if gold == answer:
        return True
    if (isinstance(gold, Expr) and is_relation(answer)) or (is_relation(gold) and isinstance(answer, Expr)):
        return False
    if _digits(gold) > _MOST_DIGITS or _digits(answer) > _MOST_DIGITS:
        return False
    if _is_endless(gold) or _is_endless(answer):
        return False
    for kind in (MatrixBase, Tuple, FiniteSet, Interval):
        if isinstance(gold, kind) and isinstance(answer, kind):
            return _equal_members(gold, answer)
    if _is_number(gold) and _is_number(answer):
        pairs = _number_pairs(gold, answer)
        return any(_equal_numbers(gold_number, answer_number) for gold_number, answer_number in pairs)
    if isinstance(gold, Expr) and isinstance(answer, Expr):
        are_equal_at_points = _equal_at_points(gold, answer)
        if are_equal_at_points is not None:
            return are_equal_at_points
    return bool(verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None))


def _equal_members(gold: Any, answer: Any) -> bool:
    """Return True if two matrices, tuples, sets or intervals have equal members. A set's order does not matter."""
    if isinstance(gold, Interval):
        same_ends = (gold.left_open, gold.right_open) == (answer.left_open, answer.right_open)
        return same_ends and _are_equal(gold.start, answer.start) and _are_equal(gold.end, answer.end)
    if isinstance(gold, MatrixBase):
        return gold.shape == answer.shape and all(map(_are_equal, gold.flat(), answer.flat()))
    if len(gold) != len(answer):
        return False
    if isinstance(gold, Tuple):
        return all(map(_are_equal, gold, answer))
    unmatched = list(answer.args)
    for gold_member in gold.args:
        index = next((index for index, member in enumerate(unmatched) if _are_equal(gold_member, member)), None)
        if index is None:
            return False
        del unmatched[index]
    return True


def _is_number(value: Any) -> bool:
    return isinstance(value, Expr) and bool(value.is_number) and not value.has(oo, -oo)


def _number_pairs(gold: Expr, answer: Expr) -> Iterator[tuple[Expr, Expr]]:
    """Yield the pairs of numbers to compare: as they are (50% is 0.5), and without the % if only one number has it.

    So an answer of 50 equals the reference 50%.
    """
    yield gold, answer
    if _is_percent(gold) != _is_percent(answer):
        yield _without_percent(gold), _without_percent(answer)


def _is_percent(value: Expr) -> bool:
    return isinstance(value, Mul) and len(value.args) == 2 and value.args[1] == UnevaluatedExpr(Rational(1, 100))


def _without_percent(value: Expr) -> Expr:
    return value.args[0] if _is_percent(value) else value


def _equal_numbers(gold: Expr, answer: Expr) -> bool:
    """Return True if two numbers are equal: exactly if both are exact, else to six decimals.

    Decimal numbers below 1 must agree in six significant digits.
    """
    gold = gold.doit()
    answer = answer.doit()
    is_decimal = gold.has(Float) or answer.has(Float)
    if not is_decimal and gold.is_Rational and answer.is_Rational:
        return bool(gold == answer)
    difference = _magnitude(gold - answer)
    scale = max(_magnitude(gold), _magnitude(answer))
    if not is_decimal:
        return bool(difference <= max(_LEAST, scale * _LEAST))
    # Number of digits before the decimal point. Below 0.1 it is minus the number of zeros behind the point.
    exponent = math.floor(sympy.log(scale, 10)) + 1 if scale else 0
    # Half a unit of the sixth decimal, or below 1 of the sixth significant digit.
    return bool(difference <= 0.5000001 * 10.0 ** (min(0, exponent) - 6))


def _magnitude(number: Expr) -> Expr:
    """Return the absolute value of a number to 30 digits. A sum that is 0 may give up to 1e-140 of its largest part."""
    return abs(number.evalf(30, maxn=150))


def _equal_at_points(gold: Expr, answer: Expr) -> bool | None:
    """Return True if two expressions have equal values at all points of `_VALUES` where both are real.

    Return None if they cannot be evaluated, or are real at fewer than `_ENOUGH_POINTS` points.
    """
    gold = gold.doit()
    answer = answer.doit()
    names = sorted({symbol.name for symbol in gold.free_symbols | answer.free_symbols})
    is_decimal = gold.has(Float) or answer.has(Float)
    tolerance = 1e-6 if is_decimal else 1e-20
    compared = 0
    for start in range(len(_VALUES)):
        # Each variable begins at another value of the list. The added index keeps the values of two variables apart.
        point = {name: _VALUES[(start + 3 * index) % len(_VALUES)] + index for index, name in enumerate(names)}
        gold_value = _value_at(gold, point)
        answer_value = _value_at(answer, point)
        if gold_value is None or answer_value is None:
            return None
        if not (gold_value.is_real and answer_value.is_real):
            continue
        if abs(gold_value - answer_value) > tolerance * max(abs(gold_value), abs(answer_value)):
            return False
        compared += 1
    return True if compared >= _ENOUGH_POINTS else None


def _value_at(expression: Expr, point: Mapping[str, Rational]) -> Expr | None:
    """Return the value of an expression at a point, to 30 digits; None if it is no number there."""
    values = {symbol: point[symbol.name] for symbol in expression.free_symbols}
    number = expression.subs(values)
    return number.evalf(30) if _is_number(number) else None


def _is_endless(value: Any) -> bool:
    """Return True if an expression has a sum, product, integral, limit or derivative that may take minutes.

    Sums, integrals and derivatives of small polynomials are quick, and so are sums and products of few terms.
    """
    terms = 1
    for part in value.atoms(Sum, Product, Integral, Limit, Derivative):
        function = part.args[0]
        if isinstance(part, Limit):
            return True
        is_small = _digits(function) <= _LARGEST_POLYNOMIAL and function.is_polynomial(*part.variables)
        if is_small and not isinstance(part, Product):
            continue
        if not isinstance(part, Sum | Product):
            return True
        for _, first, last in part.limits:
            if not (first.is_Integer and last.is_Integer):
                return True
            terms *= max(1, abs(int(last - first)) + 1)
    return terms > _MOST_TERMS


def _digits(value: Any) -> float:
    """Return an upper bound for the number of decimal digits of the numbers in an evaluation of `value`."""
    if isinstance(value, Rational):
        return math.log10(2) * int(max(value.p.bit_length(), value.q.bit_length()))
    inner = [_digits(part) for part in getattr(value, "args", ())]
    if isinstance(value, sympy.Pow | sympy.exp):
        power = value.exp
        size = float(abs(power)) if isinstance(power, Rational) else float(10.0 ** min(inner[-1], 9.0))
        return max(1.0, *inner) * max(1.0, size)
    if isinstance(value, sympy.factorial | sympy.binomial):
        exponent = min(max(inner), 9.0)
        return float(10.0**exponent) * max(1.0, exponent)
    return sum(inner, 1.0)
