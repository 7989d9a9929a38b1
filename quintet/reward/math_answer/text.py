"""From the text of an answer to tokens: styling removed, notations made one, words told from products of letters."""

from __future__ import annotations

import re
from dataclasses import dataclass

from quintet.reward.extract import closing_brace
from quintet.reward.math_answer.tree import Unreadable, names
from quintet.reward.math_answer.units import UNITS

MAX_CHARS = 2000

_UNICODE = str.maketrans(
    {
        **{
            "−": "-",
            "–": "-",
            "—": "-",
            "﹣": "-",
            "－": "-",
            "＋": "+",
            "＝": "=",
            "，": ",",
            "；": ";",
            "（": "(",
            "）": ")",
        },
        **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne "},
        **{"π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "°": r"^\circ ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in "},
        **{
            "±": r"\pm ",
            "∓": r"\mp ",
            "≈": r"\approx ",
            "∅": r"\emptyset ",
            "ℝ": r"\mathbb{R}",
            "％": "%",
            "θ": r"\theta ",
        },
        **{
            "½": r"\frac12 ",
            "¼": r"\frac14 ",
            "¾": r"\frac34 ",
            "²": "^2",
            "³": "^3",
            "⁄": "/",
            "∕": "/",
            "\u00a0": " ",
        },
        **{
            "€": r"\text{euro}",
            "£": r"\text{pound}",
            "¥": r"\text{yen}",
            "。": ".",
            "：": ":",
            "“": "",
            "”": "",
            "’": "'",
        },
    }
)
_ALIASES = {
    **{"dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom"},
    **{
        "leq": "le",
        "leqslant": "le",
        "geq": "ge",
        "geqslant": "ge",
        "neq": "ne",
        "lt": "<",
        "gt": ">",
        "sim": "approx",
    },
    **{"ast": "cdot", "bullet": "cdot", "backslash": "setminus", "smallsetminus": "setminus", "varnothing": "emptyset"},
    **{"lbrace": "{", "rbrace": "}", "mid": "|", "vert": "|", "lvert": "|", "rvert": "|", "colon": ":", "doteq": "="},
    **{"R": "reals", "Reals": "reals", "real": "reals", "infin": "infty", "degree": "circ", "simeq": "approx"},
    **{"rm": "", "bf": "", "it": "", "boxed": "", "fbox": "", "land": "and", "lor": "or", "wedge": "and", "vee": "or"},
    **{"langle": "(", "rangle": ")", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "thickspace": ""},
    **{
        "quad": "",
        "qquad": "",
        "displaystyle": "",
        "textstyle": "",
        "limits": "",
        "nolimits": "",
        "hspace": "",
        "enspace": "",
    },
    **{
        "varepsilon": "epsilon",
        "varphi": "phi",
        "vartheta": "theta",
        "angle": "",
        "triangle": "",
        "measuredangle": "",
        "dots": "ldots",
        "cdots": "ldots",
    },
}
_STYLES = (
    r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|tt|cal|bb|normal)|mbox|hbox|operatorname\*?|boldsymbol|bm"
    r"|emph|underline|bold|overline|vec|hat|bar|tilde|widehat|overrightarrow)"
)
_ACCENTS = frozenset(rf"\{name}" for name in names("overline vec hat bar tilde widehat overrightarrow"))
FUNCTIONS = names(
    "sin cos tan cot sec csc arcsin arccos arctan asin acos atan sinh cosh tanh ln log lg exp sqrt abs floor ceil gcd "
    "lcm min max"
)
GREEK = names(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau upsilon phi chi psi omega "
    "Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega ell hbar"
)
_PLAIN_NAMES = {"pi": "pi", "infinity": "infty", "infty": "infty", "inf": "infty", "oo": "infty"}
_SEPARATORS = {"or": "or", "and": "and", "或": "or", "和": "and", "或者": "or", "ou": "or"}
_NUMBER = re.compile(
    r"(?:\d+\.\d+|\.\d+|\d+\.(?=\\)|\d+)(?:\\(?:overline|dot|bar)\s*\{?(?P<repeat>\d+)\}?)?(?:[eE][+-]?\d{1,4}(?![\w]))?"
)
_STYLE = re.compile(_STYLES + r"\s*(?=\{)")
_LETTERS = re.compile(r"[A-Za-z]+|[^\W\d_A-Za-z]+")
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?!,\d)")
_PROSE = re.compile(r"(?:so |thus |hence )?(?:the )?(?:final |correct )?answer\s*(?:is|:|=)\s*", re.IGNORECASE)
_QUOTIENT = re.compile(r"([A-Za-z]+)\s*/\s*([A-Za-z]+)(?:\^\{?\d\}?)?")
_COMMAND = re.compile(r"\\([A-Za-z]+|.)", re.DOTALL)
_WORDS_ONLY = re.compile(r"[A-Za-z][A-Za-z\s'\-]*")


@dataclass(frozen=True, slots=True)
class Token:
    """`kind`: num, sym, fn, cmd, op, text, sep, row or end. `glued`: no blank before it."""

    kind: str
    text: str
    glued: bool = True


def normalise(raw: str) -> str:
    """One spelling for what is only typesetting. Raises Unreadable for a text of more than `MAX_CHARS`."""
    if len(raw) > MAX_CHARS:
        raise Unreadable(f"longer than {MAX_CHARS} characters")
    text = raw.translate(_UNICODE).strip().strip("`").strip()
    text = re.sub(r"^\*+\s*|\s*\*+$", "", text)
    text = _PROSE.sub("", text, count=1) if _PROSE.match(text) else text
    text = re.sub(r"\\\\\s*\[\d*\.?\d+(?:pt|em|ex|mm)\]", r"\\\\", text)
    text = re.sub(r"(?<!\\)\\(?:left|right)\s*\.", " ", text)
    text = re.sub(r"(?<!\\)\\(?:left|right|[bB]igg?[lrm]?|middle)(?![a-zA-Z])", "", text)
    text = text.replace("{,}", ",")
    text = re.sub(r"(?<=\d),\\!\s*(?=\d)", ",", text)
    text = re.sub(r"(?<=\d)(?<!\\)\\[,;: ]\s*(?=\d{3}(?!\d))", "", text)
    text = re.sub(r"(?<!\\)\\!", "", text)
    text = re.sub(r"(?<!\\)\\[,;: ]|~", " ", text)
    text = _money(text)
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    text = re.sub(r"(?:\\\\\s*)+$", "", text.strip())
    return re.sub(r"(?<!\.)[.;,:]$", "", text.strip()).strip()


def _money(text: str) -> str:
    r"""`\$`, or a lone `$` before a digit, is the currency; other dollar signs delimit mathematics."""
    lone = text.count("$") - text.count(r"\$") == 1
    if lone:
        text = re.sub(r"(?<!\\)\$(?=\s*[\d.])", r"\\$", text)
    text = re.sub(r"(?<!\\)\$", " ", text)
    return text.replace(r"\$", r"\dollar ")


def readings(raw: str) -> list[str]:
    """The normalised text with grouping commas removed and, where that differs, with its commas as they are."""
    text = normalise(raw)

    def ungroup(match: re.Match[str]) -> str:
        before = text[: match.start()]
        depth = sum(map(before.count, ("(", "[", r"\{"))) - sum(map(before.count, (")", "]", r"\}")))
        return match[0] if depth > 0 else match[0].replace(",", "")

    joined = _GROUPED.sub(ungroup, text)
    return [joined] if joined == text else [joined, text]


def tokenise(text: str) -> list[Token]:
    """Raises Unreadable for an unclosed brace after a style command."""
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
        return _styled(match[0].strip(), text[match.end() + 1 : end]), end + 1
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


def _styled(command: str, content: str) -> list[Token]:
    content = content.strip()
    if command == r"\mathbb":
        return [Token("cmd", "reals")] if content == "R" else [Token("sym", f"mathbb {content}")]
    if option := re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", content):
        return [Token("sym", option[1])]
    if content in FUNCTIONS and (content not in UNITS or command.startswith(r"\operatorname")):
        return [Token("fn", content)]
    if command in _ACCENTS:
        return tokenise(content)
    if re.search(r"[\d\\+=<>()*^{}]", content):
        return tokenise(normalise(content))
    tokens: list[Token] = []
    for piece in re.split(r"(,|;|\b(?:or|and)\b|或|和)", content):
        word = piece.strip()
        if word in _SEPARATORS or word in (",", ";"):
            tokens.append(Token("sep", _SEPARATORS.get(word, ",")))
        elif word:
            tokens.append(Token("sym" if len(word) == 1 and word.isascii() else "text", word))
    return tokens


def _after_value(before: list[Token]) -> bool:
    """Whether a unit may stand here."""
    return bool(before) and (before[-1].kind in ("num", "text") or before[-1].text in (")", "}", "/"))


def _letters(run: str, before: list[Token], words_only: bool) -> list[Token]:
    """A run of letters: a separator, a name, a word, a unit, or a product of one-letter symbols."""
    if run in _SEPARATORS:
        return [Token("sep", _SEPARATORS[run])]
    if not run.isascii():
        return [Token("text", run)]
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
