r"""A final answer is found where a text states it, and is right where a teacher marks it so.

Each line is (reference, completion, right). B is a box.
"""

import pytest

from rlctl.rewards.answer_reading import read_reference
from rlctl.rewards.mathematics import describe_references, is_right

B = r"\boxed{%s}"
PENS = "Ben packs 3*8=<<3*8=24>>24 pens.\nHe sells 24-6=<<24-6=18>>18 of them.\n#### 18"
TICKETS = "A ticket is $2, so nine are 9*2=$<<9*2=18>>18.\n#### 18"
ROOT = r"\sqrt{\frac{1}{n}}"
MATRIX = r"\begin{pmatrix}1&2\\3&4\end{pmatrix}"

MARKED = {
    "words": [
        ("Paris", B % "Paris", 1),
        ("Paris", B % "Pairs", 0),
        ("Paris", "The answer is Paris.", 1),
        ("Paris", "The answer is Paris, the capital of France.", 1),
        ("Paris", "The answer is Paris or London.", 0),
        ("Paris", "The answer is not Paris.", 0),
        ("Paris", "It is by the Seine.\n\n**Paris**", 1),
        ("Paris", "The answer is Paris. I hope the answer is right.", 1),
        ("北京", "答案是北京。", 1),
        ("no", B % "on", 0),
        ("yes", B % "no", 0),
        ("yes", B % r"\text{Yes}", 1),
        ("listen", B % "silent", 0),
        ("true", B % "true", 1),
        ("true", B % "false", 0),
        ("true", B % r"\text{true}", 1),
        ("Tuesday", B % r"\text{Tuesday}", 1),
        ("no solution", B % r"\text{No solution}", 1),
        ("Ann and Bob", B % "Bob and Ann", 1),
        ("July 4", B % "July 4", 1),
        ("July 4", B % "Luly 4", 0),
        # `ab` is a product of two variables, not a word.
        ("ab", B % "ba", 1),
        ("xy", B % r"y \cdot x", 1),
        ("AB+BC", B % "BC+AB", 1),
        ("USD", B % "SUD", 0),
        ("NYC", B % "CNY", 0),
        ("DNS", B % "SDN", 0),
        ("DNS", "The answer is DNS.", 1),
        ("why", B % "hwy", 0),
    ],
    "choices": [
        ("B", B % "B", 1),
        ("B", B % r"\text{B}", 1),
        ("B", "The answer is (B).", 1),
        ("B", B % "B) 12", 1),
        ("B", B % r"\textbf{(B)}", 1),
        ("B", B % "C", 0),
        ("C", "I choose B over C", 0),
        ("B", "The correct option is (B), because it rains.", 1),
        ("B", "So I take (B).", 1),
        ("B", "Answer: B or C", 0),
        ("A", "The answer is A triangle.", 0),
        ("(B) 12", B % "12", 1),
        ("(B) 12", B % "13", 0),
        ("A, C", B % "C, A", 1),
        ("(B) 12", "The answer is (B) 12 apples.", 1),
        ("(B) rain", "The answer is (B), because it rains.", 1),
        ("C. S. Lewis", B % "C. S. Lewis", 1),
        ("C. S. Lewis", B % "C. Darwin", 0),
        ("J. K. Rowling", B % "J. R. R. Tolkien", 0),
        ("J. K. Rowling", "The answer is J. K. Rowling.", 1),
        ("E. coli", B % "E. histolytica", 0),
        ("E. coli", "The answer is E. histolytica.", 0),
        ("A, C", B % "A", 0),
    ],
    "money": [
        ("$18", B % "18", 1),
        ("$18", B % r"\$18", 1),
        ("$18.50", B % "18.5", 1),
        ("$18", B % "17", 0),
        (r"\$18", B % "18", 1),
        ("18", "She pays $18.", 1),
        ("$5 and $7", B % "5", 0),
    ],
    "GSM8K": [
        *[(PENS, B % "18", 1), (PENS, B % "24", 0), (PENS, B % "3", 0)],
        *[(TICKETS, B % "18", 1), (TICKETS, B % "2", 0), (TICKETS, r"It costs \$2 each. #### 17", 0)],
        *[(f"He pays $3 + $4 = $7.\n#### {7}", B % number, int(number == 7)) for number in (7, 4, 3)],
        ("#### 1,200", B % "1200", 1),
    ],
    "written solutions": [
        (r"As $x=3$, the area is $\boxed{9}$.", B % "9", 1),
        (r"As $x=3$, the area is $\boxed{9}$.", B % "3", 0),
        ("We have $x = 3$. So the area is $x^2 = 9$.", B % "9", 1),
        ("We have $x = 3$. So the area is $x^2 = 9$.", B % "3", 0),
        ("The line is $3x-y+13=0$.", B % "0", 0),
        ("The line is $y=2x+1$.", B % "y=2x+1", 1),
    ],
    "what is not the answer": [
        ("18", "The answer is 18. Note that she does not sell the rest.", 1),
        ("18", "#### 18 (we don't count Sunday)", 1),
        ("18", "<answer>18, not 20</answer>", 1),
        ("20", "<answer>18, not 20</answer>", 0),
        ("x^2+1", "The answer is $x^2+1$. We do not simplify.", 1),
        ("6", "The answer is not 5 or 6.", 0),
        ("No", "The answer is no, they are not equal.", 1),
        ("Yes", "The answer is yes, it is.", 1),
        ("Yes", "The answer is no, it is not, but yes is near.", 0),
        ("Paris", "The answer is Paris and not London.", 1),
        ("London", "The answer is Paris and not London.", 0),
        ("B", "The answer is B and not A", 1),
        ("A", "The answer is B and not A", 0),
    ],
    "ends of statements": [
        ("7", "The answer is 7!", 1),
        ("7", "Hence the answer is **7!**", 1),
        ("5040", "The answer is $7!$", 1),
        ("5040", B % "7!", 1),
        ("42", "The answer is 42?", 1),
    ],
    "near values": [
        ("0", B % "10^{-20}", 0),
        ("0", B % "e^{-50}", 0),
        ("12345678901234567890", B % "12345678901234567891", 0),
        ("3.14159", B % "3.14160", 0),
        ("1e-5", B % "0.00001", 1),
        ("1e-5", B % "0.00002", 0),
        ("1e-9", B % "2e-9", 0),
        (r"\frac{1}{10^9}", B % "2e-9", 0),
        (r"6.02\times 10^{23}", B % r"6.03\times 10^{23}", 0),
        ("1/3", B % "0.333333", 1),
        ("1/3", B % "0.333", 0),
        ("0.30000000000000004", B % "0.3", 1),
        (r"\sqrt{2}+\sqrt{3}", B % r"\sqrt{5+2\sqrt{6}}", 1),
        ("0", B % r"(\sqrt{2})^2-2", 1),
    ],
    "lists, intervals, equations": [
        ("n=2, 3, 4", "$n=1, 2, 3$", 0),
        ("(0,1)", B % "(0, 1.5)", 0),
        ("(1,2)", B % "(2,1)", 0),
        ("[0,1)", B % "[0,1]", 0),
        ("(0,1)", B % "[0,1]", 0),
        (r"\{1,2,3\}", B % r"\{3,2,1\}", 1),
        ("12:00", B % "1:00", 0),
        ("12:00", B % "12:00", 1),
        (r"\pm 2021", B % "2021", 0),
        (r"1-\frac{1}{e}", B % r"1+\frac{1}{e}", 0),
        ("3x-y+13=0", B % "3x+4y+14=0", 0),
        ("2x+4y-3=0", B % r"y=-\frac{1}{2}x+\frac{3}{4}", 1),
        (r"x \in [0,1]", B % "[0,1]", 1),
        (r"m \geq \sqrt{2}", r"$m \in [\sqrt{2}, +\infty)$", 1),
        (r"[\sqrt{2}, +\infty)", B % r"m \geq \sqrt{2}", 1),
        (r"19, 46, \text{ and } 82", B % "21, 36, and 82", 0),
        (r"1, 2, \ldots, n", B % r"1, 3, 5, \ldots, 2n-1", 0),
        (r"1, 2, \ldots, n", B % r"1,2,\dots,n", 1),
        ("x=5", B % "5", 1),
        ("5", B % "x=5", 1),
        ("x=1", B % "y=1", 0),
        ("0", B % "3x+4y+14=0", 0),
        (r"\frac{n(n+1)}{2}", B % r"\sum_{k=1}^{n} k", 1),
        ("12", B % r"\frac{0}{0}", 0),
        ("3,5", r"$x=\boxed{3}$, and the second root is $\boxed{5}$", 1),
    ],
    "percent, units, separators": [
        ("50%", B % r"50\%", 1),
        ("50%", B % "0.5", 1),
        ("50%", B % "50", 1),
        ("12.5%", B % "12.5", 1),
        (r"28\%", B % "28 percent", 1),
        ("5 cm", B % "5", 1),
        ("5 cm", B % r"5\text{ cm}", 1),
        ("5", B % r"5 \mathrm{cm}^2", 1),
        # Neither a variable such as t nor "million" is a unit that may be left out.
        ("3t", B % "3", 0),
        ("5", B % "5x", 0),
        ("5 million", B % "5", 0),
        ("1,234", B % "1234", 1),
        ("1234", B % "1,234", 1),
        ("1234", B % "1{,}234", 1),
        ("1000000", B % r"1\,000\,000", 1),
        (r"90^\circ", B % "90", 1),
        ("60", "The answer is: 60 min", 1),
        ("30", "Answer: 30 sec", 1),
        ("90", B % r"90\text{ deg}", 1),
        (r"\min(60,x)", B % "60", 0),
    ],
    "forms": [
        (r"\text{13}", B % "13", 1),
        ("4", B % r"4\sqrt(2)", 0),
        ("4", r"$4\sqrt(2)$", 0),
        (ROOT, B % r"\frac{1}{\sqrt{n}}", 1),
        ("|x|", B % "x", 0),
        ("|x|", B % r"\sqrt{x^2}", 1),
        (r"\frac{\pi}{2}", B % "pi/2", 1),
        ("e^{16}-1", B % "-1+e^{16}", 1),
        ("-5", B % "−5", 1),
        (r"\frac{1}{2}", B % "½", 1),
        (r"\frac{3}{2}", B % "1 1/2", 1),
        ("5", B % "５", 1),
        ("x^2", B % "x²", 1),
        (r"\sqrt{2}", B % "√2", 1),
        ("2^{10}", B % "2^10", 1),
        ("5", r"\fbox{5}", 1),
        ("5", B % r"\fbox{5}", 1),
        (r"\emptyset", B % r"\varnothing", 1),
        ("0", B % r"\text{no solution}", 0),
        (r"\infty", B % r"\infty", 1),
        (r"\infty", B % r"-\infty", 0),
        (MATRIX, B % MATRIX, 1),
        (MATRIX, B % r"\begin{pmatrix}1&3\\2&4\end{pmatrix}", 0),
        ("2^{10}", B % "1024", 1),
        (r"\frac{3}{4}", B % "3:4", 1),
        ("3:4", B % r"\frac{3}{4}", 1),
        ("7_{8}", B % "7", 1),
        ("(x+1)^2", B % "x^2+2x+1", 1),
        (r"\log_2 8", B % "3", 1),
        (r"\frac{1}{3}", B % r"\int_0^1 x^2 dx", 1),
        ("32", B % r"\sum_{k=1}^{3} k^k", 1),
        ("10000000000", B % r"2\sum_{k=1}^{100000} k - 100000", 1),
        ("252", B % r"\binom{10}{5}", 1),
    ],
    "several answers": [
        ("5", f"{B % 4} or {B % 5}", 0),
        ("5", B % 5 + B % 6 + B % 7, 0),
        ("5", B % "4, 5, 6", 0),
        ("5", B % r"4 \text{ or } 5", 0),
        ("5", "It is 4. It is 5. It is 6.", 0),
        ("5", "$4$ $5$ $6$", 0),
        ("5", "The answer is 5. The answer is 6.", 0),
        ("5", "The final answer is $5$. I hope. The final answer is $6$.", 0),
        ("5", "The answer is either 5 or 6.", 0),
        ("5", B % "5 = 6", 0),
        ("5", "5 6", 0),
        ("11", B % "5 6", 0),
        ("5", B % r"5 \vee 6", 0),
        ("5", B % "x=5, x=6", 0),
        ("5", f"{B % 5} {B % ''}", 0),
        ("5", rf"First {B % 3}, then the total is {B % 5}", 1),
        *[(number, rf"We get {B % 500} first, and then {B % 1000}", 1) for number in ("1,000", "1000")],
        ("(3,4)", rf"The slope is {B % 2}, and the point is {B % '(3,4)'}", 1),
    ],
    "thinking and tags": [
        ("5", f"<think>perhaps {B % 5}</think> So {B % 6}", 0),
        ("5", f"<think>perhaps {B % 5}, let me see", 0),
        ("5", "<think>2+3=5, so</think> I cannot say.", 0),
        ("5", "<think>the answer is 5</think>", 0),
        ("5", "perhaps 4</think> It is $5$.", 1),
        ("5", "<answer>5</answer>", 1),
        ("5", "<answer> 5 </answer> compared with 7 others", 1),
        ("5", "<answer>4</answer>, no: <answer>5</answer>", 1),
        ("5", "<answer>5</answer>, no: <answer>4", 0),
        ("5", f"<answer>It is {B % 5}</answer>", 1),
        ("5", "<answer>4 or 5</answer>", 0),
    ],
    "plain statements": [
        *[("5", text, 1) for text in ("5", "The answer is 5", "**5**", "Answer: 5.", "#### 5", "Final Answer\n\n5")],
        ("5", "The answer is 5 apples, of 12.", 1),
        ("5", "The answer is not 5.", 0),
        ("7", "The answer is 2+5 = 7.", 1),
        ("x^2+1", "Answer: x^2+1", 1),
        ("5", "", 0),
        ("5", r"\boxed{5", 0),
    ],
}
# Answers that would take minutes, or all memory, if they were parsed or evaluated.
ENDLESS = [
    ("9^{9^{9^9}}", B % "9^{9^{9^9}}", 1),
    ("9^{9^{9^9}}", B % "5", 0),
    ("5", B % "9^{9^{9^9}}", 0),
    ("5", B % "(10^{9})!", 0),
    ("5", B % r"\sum_{k=1}^{1000000} k^k", 0),
    ("5", B % r"\prod_{k=1}^{100000} k", 0),
    ("5", B % r"\int_0^1 x^x dx", 0),
    *[("5", B % rf"\binom{{{n}}}{{500000}}", 0) for n in (1000000, "10^6", "{10}^{9}")],
    ("5", B % r"{1000000 \choose 500000}", 0),
    ("x+1", B % "(x+1)^{10^9}", 0),
    ("5", B % ("(" * 200 + "5" + ")" * 200), 0),
    ("5", B % ("1+" * 500 + "5"), 0),
    *[("5", text * 3_000, 0) for text in ("(", "{", "$", r"\[", "<think>", r"\boxed{", "answer is ", "1" * 9, "1 ")],
]


def find_wrong_marks(lines: list[tuple[str, str, int]]) -> list[tuple[str, str, int]]:
    wrong_marks = []
    for reference, completion, right in lines:
        answer = read_reference(reference)
        assert answer is not None
        if is_right(answer, completion) != bool(right):
            wrong_marks.append((reference, completion[:200], right))
    return wrong_marks


@pytest.mark.parametrize("group", MARKED)
def test_an_answer_is_right_where_a_teacher_marks_it_so(group: str) -> None:
    assert find_wrong_marks(MARKED[group]) == []


def test_an_endless_formula_is_wrong_and_not_evaluated() -> None:
    assert find_wrong_marks(ENDLESS) == []


@pytest.mark.parametrize(
    ("prompt", "completion", "right"),
    [
        ("2+3=?<think>\n", "it is 5", False),
        ("2+3=?<think>\n", "it is 4</think> 5", True),
        ("2+3=?<think>\n\n</think>\n\n", "5", True),
        ("2+3=?<answer>", "5</answer> of 7", True),
    ],
)
def test_a_tag_that_the_prompt_opened_counts(prompt: str, completion: str, right: bool) -> None:
    reference = read_reference("5")
    assert reference is not None
    assert is_right(reference, completion, prompt) == right


def test_it_is_told_how_references_are_read() -> None:
    references = [
        ("row 1", "18 apples"),
        ("row 2", "Paris"),
        ("row 3", "(B) 12"),
        ("row 4", "It is $x=2$."),
        ("row 5", ""),
        ("row 6", r"\{x|x>1\}"),
    ]
    assert describe_references(references) == [
        "math_verify reads 2 of 6 answers as mathematics: row 1, '18 apples', is 18",
        "math_verify reads 1 of 6 answers as words: row 2, 'Paris', is 'paris'",
        "math_verify reads 1 of 6 answers as a choice: row 3, '(B) 12', is B",
        "math_verify reads 1 of 6 answers as nothing, so that their rollouts fail: row 5, ''",
        "math_verify reads 1 of 6 answers as a text, right if it is equal: no formula that can be read: row 6, "
        r"'\\{x|x>1\\}'",
    ]
