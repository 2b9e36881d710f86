r"""Reading of a final answer as a choice, as words, or as a formula in LaTeX. Pure text; `mathematics.py` compares.

The reference answer decides the kind. A choice and words are compared as text, because the reader of formulas takes a
word as the product of its letters.
"""

import re
import unicodedata
from dataclasses import dataclass
from string import ascii_letters
from typing import Literal

from rlctl.rewards.final_answer import FinalAnswer, find_answers

Kind = Literal["choice", "words", "formula"]

_SIGN_TABLE = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∞": r"\infty "}
    | {"≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "≈": r"\approx ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap "}
    | {"∈": r"\in ", "∅": r"\emptyset ", "°": r"^\circ ", "π": r"\pi ", "θ": r"\theta ", "…": r"\ldots "}
    | {"ℝ": r"\mathbb{R}", "。": ".", "“": '"', "”": '"', "’": "'", "‘": "'"}
)
_SUPERSCRIPTS = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")
_ROOT_SIGN = re.compile(r"√\s*(?:\((?P<group>[^()]*)\)|(?P<atom>\d+(?:\.\d+)?|[A-Za-z]))")
_FRACTION_SIGN = re.compile("[¼-¾⅐-⅞]")

_NUMBER = r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?|\.\d+)"
# A number, or several numbers with operators between them.
_SUM = rf"(?<![\w.\\^{{}}])[-+]?{_NUMBER}(?:\s*[-+*/^:=]\s*-?{_NUMBER})*(?:\s*(?:\\?%|percent\b))?"
# A formula between delimiters. Dollars enclose a formula by Pandoc's rule, or with blanks inside both dollars: the
# dollars of `$5 and $7` are money.
_SPAN = (
    r"\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)"
    r"|(?<![\\$\d])\$(?:(?![\s$])(?:[^$\n]*[^\s\\$])?|[ \t]+[^$\n]*[ \t])\$(?!\d)"
)
_FORMULA = re.compile(rf"(?P<span>{_SPAN}|-?\\[dt]?frac\{{[^{{}}]*\}}\{{[^{{}}]*\}})|{_SUM}", re.DOTALL)
_JOINS_FORMULAS = re.compile(r"\s*(?:,?\s*and|,?\s*or|,)\s*", re.IGNORECASE)
# Words of a negation. The text behind them is not the answer.
_NEGATION = re.compile(r"(?<!\\)\bnot\b|n't\b|\b(?:rather\s+than|instead\s+of)\b", re.IGNORECASE)

_TEXT_COMMAND = re.compile(r"\\(?:text(?:bf|it|rm|normal|sf)?|math(?:rm|bf|it|sf)|mbox|boxed|fbox)\s*\{([^{}]*)\}")
# Markdown's emphasis. Two stars between operands are a power, so they do not match.
_EMPHASIS = re.compile(r"(?<![\w)}])\*\*|\*\*(?![\w(\\])|__|`")
_CALCULATION = re.compile(r"<<[^<>]*>>")
_DELIMITERS = re.compile(r"^(?:\$\$?|\\[\[(])|(?:\$\$?|\\[\])])$")
_LETTERS = frozenset(ascii_letters)
_COMMAND = re.compile(r"\\[A-Za-z]+|\\.")
_WORD = re.compile(r"[^\W\d_]{2,}")
# Words that may occur in formulas and in lists of values.
_FORMULA_WORD = re.compile(
    "and|or|either|both|(?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|log|ln|exp|sqrt|pi|inf|infinity|infty|max|min|gcd|lcm|mod"
    "|det|lim|deg|alpha|beta|gamma|delta|theta|lambda|mu|phi|omega|sigma|percent|percentage|pct|[pbv]?matrix|cases"
    "|array|aligned",
    re.IGNORECASE,
)
# Two to four different letters that are a product of variables, such as xy, and no word, such as why or try.
_PRODUCT = re.compile(r"(?=.{2,4}$)(?!.*(.).*\1)(?!(?=.{3})[^x]*y)(?:[bcdhkmnpqrstuvwxyz]+|a[bcdxyz]+)")
_ABBREVIATION = re.compile("[A-Z]{2,}")
_INITIAL = re.compile(r"(?<![A-Za-z])[A-Z]\.\s*$")
_UNIT = re.compile(r"(?<=[\d})\s])\s*(?P<unit>[A-Za-z]+(?:[ /]+[A-Za-z]+)*)\.?(?:\s*\^\{?\d\}?)?\s*$")
_SHORT_UNIT = re.compile("[kmcd]?[mgl]|[shL]|ft|mph|hr|yd|lb")
# Units that are also names of functions. At the end of a text they are units, because no argument follows.
_UNIT_AND_FUNCTION = re.compile("min|sec|deg")
_MAGNITUDE = re.compile("hundred|thousand|[mbtr]+illion|dozen", re.IGNORECASE)
_TWO_NUMBERS = re.compile(r"(?<!_)\d\s+\d")

_LETTER = "[A-J]"
# A choice: a letter in brackets, or a letter before a sign or before the end.
_CHOICE = re.compile(rf"(?:[Oo]ption|[Cc]hoice)?\s*(?:\(({_LETTER})\)|({_LETTER})(?:[).:]|\s*$))")
_SMALL_CHOICE = re.compile(r"\(?([a-j])\)?")
# A letter before its reason, such as "B because". A and I are left out, because they are also words.
_CHOICE_IN_PROSE = re.compile(
    r"(?:[Oo]ption|[Cc]hoice)?\s*([B-HJ])(?=,|;|\s+(?:because|since|as|is|(?:(?:and|but)\s+)?not|rather|instead)\b|\s+[^\w\s]|\s+\d)"
)
_SECOND_CHOICE = re.compile(rf"\W*(?:or\b|and\b|/|&|,)\W*{_LETTER}\b(?!')")
_BRACKETED_CHOICE = re.compile(rf"\(({_LETTER})\)")
_VERDICTS = frozenset(("right", "correct", "wrong", "incorrect"))
# First word of a reason or of another sentence.
_CLAUSE = re.compile(
    r"\W*(?:the|an?|which|who|where|because|since|as|so|i|you|he|she|it|we|they|this|that|these|those|there|not)\b"
)
_BEHIND_WORDS = re.compile(
    r"\s*(?:$|[.;:!?)\n(]|,?\s*(?:because|since|(?:(?:and|but)\s+)?not|rather than|instead of)\b"
    rf"|,{_CLAUSE.pattern})"
)
_BETWEEN_WORDS = re.compile(r"\s*[,;]\s*(?:and\s+|or\s+)?|\s+(?:and|or|&)\s+")

_MONEY = re.compile(r"\\?\$|[€£¥₹]")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+(?:\.\d+)?|\.\d+)[eE]([-+]?\d+)(?![\w.])")
_PLAIN_NAME = re.compile(r"(?<![A-Za-z\\])(sin|cos|tan|cot|sec|csc|log|ln|pi|theta|infinity|infty)(?![a-z])")
_ROOT = re.compile(r"(?:\\|(?<![A-Za-z\\]))sqrt\s*\(((?:[^()]|\([^()]*\))*)\)")
_LONG_POWER = re.compile(r"\^(-?\d{2,}|-\d)")
_GROUPED_DIGITS = re.compile(r"(?<=\d)(?:\\[ ,;:!]|~|\s)+(?=\d{3}(?!\d))")
_MIXED_NUMBER = re.compile(r"(?<![\d./])(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d/])")
_OPEN_FRACTION = re.compile(r"frac\s*(\d)\s+(\d)")
_SPACING = re.compile(r"\\(?:[,;:! ]|q?quad(?![A-Za-z]))|~")


@dataclass(frozen=True)
class Reference:
    """A reference answer in the form that answers are compared with."""

    kind: Kind
    # Letter of the choice, words in lower case, or LaTeX.
    text: str
    # True if the formula is the last one of a written solution. For `x^2 = 9` the answer 9 is then right too.
    is_prose: bool = False
    # Text behind the letter of a choice.
    label: "Reference | None" = None


def read_reference(answer: str) -> Reference | None:
    """Return a reference answer in the form that answers are compared with; None for an empty answer."""
    final_answer = next(find_answers(plain_signs(answer), is_list=True), None)
    if final_answer is None:
        return None
    text = _strip_markup(final_answer.text).strip(" $")
    choice = _CHOICE.match(text)
    if choice and not _SECOND_CHOICE.match(text, choice.end()):
        label = text[choice.end() :].strip()
        return Reference("choice", choice[1] or choice[2], label=read_reference(label) if label else None)
    is_prose = final_answer.place == "text" and not is_bare(final_answer.text)
    # Prose without a formula between delimiters is compared as words. A number in it need not be the answer.
    if is_prose and not re.search(_SPAN, final_answer.text):
        return Reference("words", read_words(final_answer.text))
    if formula := read_formula(final_answer):
        return Reference("formula", formula, is_prose=is_prose)
    return Reference("words", read_words(final_answer.text))


def read_choice(final_answer: FinalAnswer) -> tuple[str, str] | None:
    """Return the letter of an answer's choice and the text of the choice; None if it names no letter or several.

    The text is empty if only a letter or a letter with a reason is given.
    """
    text = _strip_markup(final_answer.text).strip(" $")
    if small_choice := _SMALL_CHOICE.fullmatch(text):
        return small_choice[1].upper(), ""
    if choice := _CHOICE.match(text) or _CHOICE_IN_PROSE.match(text):
        letter = next(group for group in choice.groups() if group)
        if _SECOND_CHOICE.match(text, choice.end()):
            return None
        # Behind a letter in prose stands a reason, and no text of the choice.
        label = text[choice.end() :].strip() if choice.re is _CHOICE else ""
        is_reason = final_answer.place in ("statement", "text") and _CLAUSE.match(label.casefold())
        return letter, "" if is_reason else label
    # For example "So I choose (B)."
    last_line = text.splitlines()[-1] if text else ""
    letters = set(_BRACKETED_CHOICE.findall(last_line))
    return (letters.pop(), "") if len(letters) == 1 else None


def has_words(final_answer: FinalAnswer, words: str) -> bool | None:
    """Return True if an answer is `words`: the whole answer, the last line of a text, or the beginning of a statement.

    Words of a list may come in any order. Return None for a statement such as "the answer is right", which gives no
    answer.
    """
    text = final_answer.text
    if final_answer.place == "text":
        text = text.splitlines()[-1]
    answer_words = read_words(text)
    if sorted(_BETWEEN_WORDS.split(answer_words)) == sorted(_BETWEEN_WORDS.split(words)):
        return True
    if final_answer.place != "statement":
        return False
    if answer_words in _VERDICTS and words not in _VERDICTS:
        return None
    return answer_words.startswith(words) and _BEHIND_WORDS.match(answer_words, len(words)) is not None


def read_words(text: str) -> str:
    """Return a text in lower case with single blanks, without markup, outer punctuation and a first article."""
    words = " ".join(_SPACING.sub(" ", _strip_markup(text)).casefold().split()).strip(" $.,;:!?\"'()*\\")
    article, _, rest = words.partition(" ")
    return rest if rest and article in ("a", "an", "the") else words


def read_formula(final_answer: FinalAnswer, gold: str | None = None) -> str | None:
    """Return the LaTeX of an answer: the whole answer if it is a formula, else one formula or number in it.

    Of a statement the first formula is taken, of a text the last one, of a tag the only one, of a box none. Return None
    without such a formula. gold: the reference's formula. Its variables are read as variables, not as units or words.
    """
    variables = None if gold is None else frozenset(_COMMAND.sub(" ", gold)) & _LETTERS
    text = _CALCULATION.sub("", _strip_markup(final_answer.text)).strip()
    # In "It is 7!" the sign is punctuation, in `x = 7!` a factorial.
    if final_answer.place == "statement" and "=" not in text:
        text = text.rstrip("!")
    if is_bare(text, variables):
        return _clean_latex(text, variables)
    if final_answer.place != "text":
        text = _NEGATION.split(text, maxsplit=1)[0]
    formulas = [] if final_answer.place == "box" else _find_formulas(text)
    if not formulas or (final_answer.place == "tag" and len(formulas) > 1):
        return None
    formula = formulas[0] if final_answer.place == "statement" else formulas[-1]
    return _clean_latex(formula, variables)


def is_bare(text: str, variables: frozenset[str] | None = None) -> bool:
    """Return True if a text is only a formula, a list of values or a quantity, without other words.

    variables: a word of these letters is a product of variables. None: `_PRODUCT` decides.
    """
    text = _strip_markup(_OPEN_FRACTION.sub(r"frac{\1}{\2}", text)).strip(" .?")
    # A text with delimiters or with several lines must be one formula as a whole. A matrix may have several lines.
    if (re.search(_SPAN, text) or ("\n" in text and "\\begin" not in text)) and _find_formulas(text) != [text]:
        return False
    text = _without_unit(text, variables)
    if variables is None and _ABBREVIATION.fullmatch(text.strip("$ ")):
        return False
    if _TWO_NUMBERS.search(_MIXED_NUMBER.sub("", _GROUPED_DIGITS.sub("", text))):
        return False
    words = _WORD.findall(_COMMAND.sub(" ", text))
    return all(_FORMULA_WORD.fullmatch(word) or _is_product(word, variables) for word in words)


def _clean_latex(text: str, variables: frozenset[str] | None) -> str | None:
    """Return a formula for math-verify, without delimiters, units, signs of money and spacing; None if it is empty."""
    text = _strip_markup(_DELIMITERS.sub("", text.strip().rstrip(".,;:?"))).strip().rstrip(".,;:?")
    text = _without_unit(text, variables)
    text = _MONEY.sub("", text).replace(r"\varnothing", r"\emptyset").replace("**", "^")
    text = _SPACING.sub(" ", _GROUPED_DIGITS.sub("", text))
    text = _OPEN_FRACTION.sub(r"frac{\1}{\2}", text)
    text = _MIXED_NUMBER.sub(r"\1\\frac{\2}{\3}", text)
    text = _SCIENTIFIC.sub(r"\1 \\cdot 10^{\2}", text)
    text = _ROOT.sub(r"\\sqrt{\1}", text)
    text = _PLAIN_NAME.sub(lambda name: rf"\{name[1].replace('infinity', 'infty')} ", text)
    text = _LONG_POWER.sub(r"^{\1}", text).strip()
    return text or None


def plain_signs(text: str) -> str:
    """Return a text with full-width characters, fraction signs, powers and operators rewritten in ASCII and LaTeX."""
    if text.isascii():
        return text
    text = _FRACTION_SIGN.sub(_latex_fraction, text)
    text = _SUPERSCRIPTS.sub(lambda power: "^{" + unicodedata.normalize("NFKC", power[0]).replace("−", "-") + "}", text)
    text = _ROOT_SIGN.sub(lambda root: rf"\sqrt{{{root['group'] or root['atom']}}}", text)
    return unicodedata.normalize("NFKC", text.translate(_SIGN_TABLE))


def _latex_fraction(sign: re.Match[str]) -> str:
    numerator, _, denominator = unicodedata.normalize("NFKC", sign[0]).partition("⁄")
    return rf"\frac{{{numerator}}}{{{denominator}}}"


def _strip_markup(text: str) -> str:
    r"""Return a text without Markdown's emphasis, and without commands such as `\text{...}` around words."""
    return _TEXT_COMMAND.sub(r" \1 ", _EMPHASIS.sub("", text))


def _without_unit(text: str, variables: frozenset[str] | None) -> str:
    """Return a quantity without the unit at its end.

    variables: see `is_bare`. If there are any, a short unit such as `m` is read as a variable.
    """
    unit = _UNIT.search(text)
    if unit is None or not text[: unit.start()].strip() or _INITIAL.search(text, 0, unit.start()):
        return text
    for word in re.split(r"[ /]+", unit["unit"]):
        if _UNIT_AND_FUNCTION.fullmatch(word) or (_SHORT_UNIT.fullmatch(word) and not variables):
            continue
        is_value = _FORMULA_WORD.fullmatch(word) or _MAGNITUDE.fullmatch(word) or _is_product(word, variables)
        if len(word) < 2 or is_value:
            return text
    return text[: unit.start()].rstrip(" .,;:")


def _is_product(word: str, variables: frozenset[str] | None) -> bool:
    """Return True if a word is a product of variables, such as xy. variables: see `is_bare`."""
    if variables:
        return variables.issuperset(word)
    return (word.islower() or word.isupper()) and _PRODUCT.fullmatch(word.lower()) is not None


def _find_formulas(text: str) -> list[str]:
    """Return the formulas between delimiters and the numbers of a text, in order.

    Joined formulas such as `$4$ and $5$` become one formula, a list.
    """
    formulas: list[str] = []
    end = 0
    for formula in _FORMULA.finditer(text):
        if formula["span"] and formulas and _JOINS_FORMULAS.fullmatch(text, end, formula.start()):
            formulas[-1] = f"{_DELIMITERS.sub('', formulas[-1])},{_DELIMITERS.sub('', formula[0])}"
        else:
            formulas.append(formula[0])
        end = formula.end()
    return formulas
