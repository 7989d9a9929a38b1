"""From the normalised text of an answer to tokens: styling removed, words told from products of letters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quintet.reward.extract import closing_brace
from quintet.reward.math_answer.spelling import normalise
from quintet.reward.math_answer.tree import Unreadable, names
from quintet.reward.math_answer.units import UNITS

_ALIASES = {
    **dict.fromkeys(names("dfrac tfrac cfrac"), "frac"),
    **dict.fromkeys(names("dbinom tbinom"), "binom"),
    **dict.fromkeys(names("leq leqslant leqq"), "le"),
    **dict.fromkeys(names("geq geqslant geqq"), "ge"),
    **dict.fromkeys(names("sim simeq approxeq cong"), "approx"),
    **dict.fromkeys(names("ast bullet star"), "cdot"),
    **dict.fromkeys(names("backslash smallsetminus"), "setminus"),
    **dict.fromkeys(names("R Reals real"), "reals"),
    **dict.fromkeys(names("land wedge"), "and"),
    **dict.fromkeys(names("lor vee"), "or"),
    **dict.fromkeys(names("mid vert lvert rvert"), "|"),
    **dict.fromkeys(names("dots cdots dotsc dotsb"), "ldots"),
    **dict.fromkeys(names("doteq equiv Leftrightarrow iff"), "="),
    **dict.fromkeys(names("langle lparen"), "("),
    **dict.fromkeys(names("rangle rparen"), ")"),
    **dict.fromkeys(names("rm bf it boxed fbox thickspace quad qquad displaystyle textstyle limits nolimits"), ""),
    **dict.fromkeys(names("hspace enspace angle triangle measuredangle square"), ""),
    **{"neq": "ne", "lt": "<", "gt": ">", "varnothing": "emptyset", "lbrace": "{", "rbrace": "}", "colon": ":"},
    **{"infin": "infty", "degree": "circ", "lbrack": "[", "rbrack": "]", "arctg": "arctan", "tg": "tan", "ctg": "cot"},
    **{"varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta"},
}
_STYLES = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|cal|bb|normal)|mbox|hbox|operatorname\*?|boldsymbol|bm"
    r"|emph|underline|bold|overline|vec|hat|bar|tilde|widehat|overrightarrow)"
)
_ACCENTS = frozenset(rf"\{name}" for name in names("overline vec hat bar tilde widehat overrightarrow"))
_UPRIGHT = frozenset(rf"\{name}" for name in names("text textrm textnormal mathrm mbox hbox operatorname rm"))
FUNCTIONS = names(
    "sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh ln log lg exp sqrt abs floor ceil gcd "
    "lcm min max"
)
GREEK = names(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
)
_PLAIN_NAMES = {"pi": "pi", "infinity": "infty", "infty": "infty", "inf": "infty", "oo": "infty"}
_PHRASES = {
    **dict.fromkeys(("infinity", "positive infinity"), (("cmd", "infty"),)),
    "negative infinity": (("op", "-"), ("cmd", "infty")),
    **dict.fromkeys(("all real numbers", "all reals", "all real", "the real numbers", "reals"), (("cmd", "reals"),)),
    **dict.fromkeys(("empty set", "the empty set"), (("cmd", "emptyset"),)),
    **dict.fromkeys(("no solution", "no solutions", "no real solution", "no real solutions"), (("cmd", "emptyset"),)),
}
_MULTIPLES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ORDINALS = names("th st nd rd")
_OPTION = re.compile(r"(?:(?:option|choice|answer)\s+)?\(?([A-Za-z])\)?[.:]?", re.IGNORECASE)
_UNIT_EXPRESSION = re.compile(r"[A-Za-zµ°\s./*^{}\d-]*[A-Za-z][A-Za-zµ°\s./*^{}\d-]*")
_SEPARATORS = {"or": "or", "and": "and", "或": "or", "和": "and", "或者": "or", "ou": "or"}
_NUMBER = re.compile(
    r"(?:\d+\.\d+|\.\d+|\d+\.(?=\\)|\d+)(?:\\(?:overline|dot|bar)\s*\{?(?P<repeat>\d+)\}?)?(?:[eE][+-]?\d{1,4}(?![\w]))?"
)
_STYLE = re.compile(_STYLES + r"\s*(?=\{)")
_LETTERS = re.compile(r"[A-Za-z]+|[^\W\d_A-Za-z]+")
_QUOTIENT = re.compile(r"([A-Za-z]+)\s*/\s*([A-Za-z]+)(?:\^\{?\d\}?)?")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_WORDS_ONLY = re.compile(r"[A-Za-z][A-Za-z\s,'&\-]*")


@dataclass(frozen=True, slots=True)
class Token:
    """`kind`: num, sym, fn, cmd, op, text, sep, row or end. `glued`: no blank before it."""

    kind: str
    text: str
    glued: bool = True


def tokenise(text: str) -> list[Token]:
    """Raises Unreadable for an unclosed brace after a style command."""
    if phrase := _PHRASES.get(text.strip().lower()):
        return [Token(kind, word) for kind, word in phrase]
    tokens: list[Token] = []
    words_only = _WORDS_ONLY.fullmatch(text) is not None
    position = 0
    while position < len(text):
        blank = len(text) - position - len(text[position:].lstrip())
        position += blank
        if position >= len(text):
            break
        added, position = _next(text, position, tokens, words_only)
        if added and blank:
            added[0] = Token(added[0].kind, added[0].text, glued=False)
        tokens.extend(added)
    return tokens


def _next(text: str, at: int, before: list[Token], words_only: bool) -> tuple[list[Token], int]:
    """Tokens that begin at `at`, and where they end."""
    if match := _NUMBER.match(text, at):
        return [Token("num", match[0])], match.end()
    if match := _STYLE.match(text, at):
        end = closing_brace(text, match.end())
        if end is None:
            raise Unreadable("unclosed brace")
        return _styled(match[0].strip(), text[match.end() + 1 : end], before), end + 1
    if text.startswith("\\\\", at):
        return [Token("row", "\\\\")], at + 2
    if match := _COMMAND.match(text, at):
        return _command(match[1]), match.end()
    if (
        (match := _QUOTIENT.match(text, at))
        and _after_value(before)
        and {match[1].lower(), match[2].lower()} <= UNITS.keys()
    ):
        return [Token("text", match[0])], match.end()
    if match := _LETTERS.match(text, at):
        return _letters(match[0], before, words_only), match.end()
    for sign, token in (
        ("...", Token("cmd", "ldots")),
        ("**", Token("op", "^")),
        ("<=", Token("cmd", "le")),
        (">=", Token("cmd", "ge")),
    ):
        if text.startswith(sign, at):
            return [token], at + len(sign)
    return [Token("op", text[at])], at + 1


def _command(name: str) -> list[Token]:
    name = _ALIASES.get(name, name)
    if name in ("", " "):
        return []
    if name in ("or", "and"):
        return [Token("sep", name)]
    if name in FUNCTIONS and name != "sqrt":
        return [Token("fn", name)]
    if name in GREEK:
        return [Token("sym", name)]
    if name in ("%", "<", ">", "=", "|", ":", "(", ")", "[", "]"):
        return [Token("op", name)]
    if name == "dollar":
        return [Token("text", "dollar")]
    return [Token("cmd", name)]


def _styled(command: str, content: str, before: list[Token]) -> list[Token]:
    """What stands in `\\text{...}` and its like."""
    content = content.strip()
    if command == r"\mathbb":
        return [Token("cmd", "reals")] if content == "R" else [Token("sym", f"mathbb {content}")]
    if phrase := _PHRASES.get(content.lower()):
        return [Token(kind, word) for kind, word in phrase]
    if len(content) == 1 and content.lower() in UNITS and _after_value(before) and command in _UPRIGHT:
        return [Token("text", content)]
    if option := _OPTION.fullmatch(content):
        return [Token("sym", option[1])]
    if content in FUNCTIONS and (content not in UNITS or command.startswith(r"\operatorname")):
        return [Token("fn", content)]
    if command in _ACCENTS:
        return tokenise(content)
    if _after_value(before) and (unit := _unit_in(content)) is not None:
        return [Token("text", unit)]
    if re.search(r"[\d\\+=<>()*^{}|]|^\W$", content):
        return tokenise(normalise(content))
    tokens: list[Token] = []
    for piece in re.split(r"(,|;|\b(?:or|and)\b|或|和)", content):
        word = piece.strip()
        if word in _SEPARATORS or word in (",", ";"):
            tokens.append(Token("sep", _SEPARATORS.get(word, ",")))
        elif word:
            tokens += _words(word, tokens or before)
    return tokens


def _unit_in(content: str) -> str | None:
    r"""`\mathrm{m/s^2}`, `\mathrm{m\,s^{-2}}`: a product of known units with powers; None for anything else."""
    content = re.sub(r"\\[,;: ]|\\cdot(?![a-z])|\\|·", " ", content)
    words = re.findall(r"[A-Za-z]+", content)
    known = words and all(word in UNITS or word.lower() in UNITS for word in words)
    return content if known and re.search(r"[\d^]", content) and _UNIT_EXPRESSION.fullmatch(content) else None


def _words(words: str, before: list[Token]) -> list[Token]:
    """Words in a style command: `million` multiplies, `to` between numbers is a ratio, `th` after one says nothing."""
    first, _, rest = words.partition(" ")
    if before and before[-1].kind == "num":
        if first in _MULTIPLES:
            tokens = [Token("op", "*"), Token("num", str(_MULTIPLES[first]))]
            return tokens + (_words(rest, tokens) if rest.strip() else [])
        if words == "to":
            return [Token("op", ":")]
        if words in _ORDINALS:
            return []
    return [Token("sym" if len(words) == 1 and words.isascii() else "text", words)]


def _after_value(before: list[Token]) -> bool:
    """Whether a unit may stand here."""
    return bool(before) and (before[-1].kind in ("num", "text") or before[-1].text in (")", "}", "/"))


def _letters(run: str, before: list[Token], words_only: bool) -> list[Token]:
    """A run of letters: a separator, a name, a word, a unit, or a product of one-letter symbols."""
    if run in _SEPARATORS:
        return [Token("sep", _SEPARATORS[run])]
    if not run.isascii():
        return [Token("text", run)]
    if before and before[-1].kind == "num" and run.lower() in (*_MULTIPLES, *_ORDINALS, "to"):
        return _words(run.lower(), before)
    if run in _PLAIN_NAMES:
        return [Token("cmd", _PLAIN_NAMES[run])]
    if _after_value(before) and len(run) > 1 and run.lower() in UNITS:
        return [Token("text", run)]
    if run == "sqrt":
        return [Token("cmd", "sqrt")]
    if run in FUNCTIONS:
        return [Token("fn", run)]
    if run in GREEK:
        return [Token("sym", run)]
    name = next((run[:n] for n in (6, 4, 3, 2) if run[:n] in FUNCTIONS and len(run) - n == 1), None)
    if name is not None:  # sinx
        return [Token("fn", name), Token("sym", run[len(name) :])]
    product = not set(run.lower()) & set("aeiou") or set(run.lower()) <= set("abcd")
    if len(run) > 3 or (len(run) == 3 and words_only and not product) or run.lower() in ("yes", "no", "odd"):
        return [Token("text", run)]
    return [Token("sym", letter) for letter in run]
