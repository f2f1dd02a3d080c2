"""Two published rules for equality of mathematical answers, as RL papers use them to score MATH.

`mathd_equal` compares texts after the normalisation of the MATH data set (Hendrycks et al. 2021). `sympy_equal` is the
grader of PRM800K (Lightman et al. 2023): units and words out, tuples part by part, then the value of the difference.
What differs: a value is found by our own reader of arithmetic and, where that cannot decide, by sympy in a process that
can be stopped; the original evaluates the text as Python. The Unicode minus is a minus.
"""

from __future__ import annotations

import re

from slimecli.data_tools.rewards.arithmetic import same_value

_UNITS = (
    "degree", "cm", "centimeter", "meter", "mile", "second", "minute", "hour", "day", "week", "month", "year", "foot",
    "feet", "inch", "yard",
)  # fmt: skip
_UNIT = re.compile(rf"({'|'.join(_UNITS)})(es)?(s)? *(\^[0-9]+)?")
_LARGE = {"million": "*10^6", "billion": "*10^9", "trillion": "*10^12"}
_FRACTION = re.compile(r"-?[0-9]+.?/0*[1-9][0-9]*.?")
_LATEX = {
    "\\cdot": "*", "\\times": "*", "\\pi": "pi", "\\infty": "inf", "\\cup": "U", "\\div": "/", "\\pm": "±", "\\ ": " ",
    "\\,": "", "\\;": "", "\\(": "", "\\)": "", "\\{": "", "\\}": "",
}  # fmt: skip
_TWO_GROUPS = re.compile(r"\\frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}")
_ROOT = re.compile(r"\\sqrt\s*\{([^{}]*)\}")


def mathd_equal(given: str, wanted: str) -> bool:
    """Whether both texts are the same after normalisation."""
    return mathd_normalise(given) == mathd_normalise(wanted)


def mathd_normalise(text: str) -> str:
    """The normal form of the MATH data set."""
    text = several(text.strip()).replace("−", "-")
    whole = re.fullmatch(r"\\text\{(.+?)\}", text)
    text = (whole.group(1) if whole else text).strip()
    for old, new in (("\n", ""), ("\\!", ""), ("\\\\", "\\"), ("tfrac", "frac"), ("dfrac", "frac"), ("\\left", "")):
        text = text.replace(old, new)
    for old in ("\\right", "^{\\circ}", "^\\circ", "\\$"):
        text = text.replace(old, "")
    text = text.split("\\text{ ")[0].replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = f"0{text}" if text.startswith(".") else text
    sides = text.split("=")
    text = sides[1] if len(sides) == 2 and len(sides[0].strip()) <= 2 else text
    text = re.sub(r"\\sqrt([^{\s])", r"\\sqrt{\1}", text).replace(" ", "")
    text = re.sub(r"\\frac([^{])([^{])", r"\\frac{\1}{\2}", text)
    text = re.sub(r"\\frac([^{])\{", r"\\frac{\1}{", text)
    text = "\\frac{1}{2}" if text == "0.5" else text
    ratio = re.fullmatch(r"(-?\d+)/(-?\d+)", text)
    return f"\\frac{{{ratio.group(1)}}}{{{ratio.group(2)}}}" if ratio else text


def several(text: str) -> str:
    """`a \\text{ or } b` is two answers, not an answer with a unit."""
    return re.sub(r"\\(text|mbox)\{\s*(or|and)\s*\}", ",", text)


def sympy_equal(given: str, wanted: str) -> bool:
    """Whether PRM800K's rules call the answers equal. Two fractions must be written alike, an integer stays one."""
    given, wanted = sympy_normalise(given), sympy_normalise(wanted)
    if given == wanted:
        return bool(wanted)
    if not given or not wanted:
        return False
    ours, theirs = _members(given), _members(wanted)
    if len(ours) != len(theirs) or (len(theirs) > 1 and (given[0], given[-1]) != (wanted[0], wanted[-1])):
        return False
    return all(_member_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _member_equal(given: str, wanted: str) -> bool:
    if _FRACTION.fullmatch(given) and _FRACTION.fullmatch(wanted):
        return given == wanted
    if _is_integer(given) != _is_integer(wanted):
        return False
    return _may_evaluate(given) and _may_evaluate(wanted) and same_value(given, wanted)


def sympy_normalise(text: str) -> str:
    """PRM800K's normal form: lower case, no spaces, units or braces."""
    text = several(text.strip()).replace("−", "-")
    whole = re.fullmatch(r"\\text\{(.+?)\}", text)
    text = (whole.group(1) if whole else text).replace("\\%", "").replace("%", "").replace("\\$", "").replace("$", "")
    text = text.replace(" or ", " , ").replace(" and ", " , ")
    for word, factor in _LARGE.items():
        text = text.replace(word, factor)
    text = re.sub(r"\^ *\\circ", "", _UNIT.sub("", text))
    text = text[1:-1] if len(text) > 1 and text[0] == "{" and text[-1] == "}" else text
    text = re.sub(r",\\! *", "", text)
    if "\\" in text:
        text = _latex_to_text(text)
    text = re.sub(r"- *", "-", text)
    text = re.sub(r"(?<=[0-9]) +(?=[0-9])", "+", text).replace(" ", "").replace("{", "").replace("}", "").lower()
    plain = _without_thousands(text)
    try:
        number = float(plain)
    except ValueError:
        return text
    return str(round(number)) if abs(number) < 1e15 and abs(number - round(number)) <= 1e-7 else text


def _latex_to_text(text: str) -> str:
    text = re.sub(r"\\(left|right|displaystyle|text|mathrm|mbox|textbf|mathbf)(?![a-z])", "", text)
    text = re.sub(r"\\[td]?frac", r" \\frac", text)
    text = re.sub(r"\\frac(\d)(\d)", r"\\frac{\1}{\2}", re.sub(r"\\sqrt(\d|[a-z])", r"\\sqrt{\1}", text))
    for _ in range(8):  # innermost first
        text, before = _ROOT.sub(r"sqrt(\1)", _TWO_GROUPS.sub(_fraction, text)), text
        if text == before:
            break
    for name, plain in _LATEX.items():
        text = text.replace(name, plain)
    return text.replace("\\", "").strip()


def _fraction(match: re.Match[str]) -> str:
    top, bottom = (part if re.fullmatch(r"\s*-?[\w.]+\s*", part) else f"({part})" for part in match.groups())
    return f"{top}/{bottom}"


def _members(text: str) -> list[str]:
    text = _without_thousands(text)
    if len(text) > 2 and text[0] in "([" and text[-1] in ")]" and not set(text[1:-1]) & set("()[]"):
        return [part.strip() for part in text[1:-1].split(",")]
    return [text]


def _without_thousands(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def _is_integer(text: str) -> bool:
    return bool(re.fullmatch(r"-?\d+(\.0*)?", text))


def _may_evaluate(text: str) -> bool:
    letters = set(re.findall(r"[a-z]", text.replace("sqrt", "").replace("frac", "")))
    return len(letters) <= 2 and not re.search(r"\^\{|\^\(|\^[0-9]+\^|\^[0-9][0-9]+", text)
