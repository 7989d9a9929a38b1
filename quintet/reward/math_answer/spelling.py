"""One spelling for what is only typesetting or notation: from the raw text of an answer to text that can be tokenised.

All rewriting is by regular expressions; none backtracks more than quadratically, on a text of at most `MAX_CHARS`.
"""

from __future__ import annotations

import re

from quintet.reward.math_answer.tree import Unreadable

MAX_CHARS = 2000

_SUPERSCRIPTS, _SUBSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "₀₁₂₃₄₅₆₇₈₉"
_PLAIN_OF_SUPERSCRIPT = str.maketrans(_SUPERSCRIPTS, "0123456789-+n")
_PLAIN_OF_SUBSCRIPT = str.maketrans(_SUBSCRIPTS, "0123456789")
_UNICODE = str.maketrans(
    {
        **dict.fromkeys("−–—﹣－‐‑", "-"),
        **{"＋": "+", "＝": "=", "，": ",", "；": ";", "、": ",", "（": "(", "）": ")", "［": "[", "］": "]"},
        **{"｛": "{", "｝": "}", "：": ":", "。": ".", "．": ".", "％": "%", "⁄": "/", "∕": "/", "／": "/", "＜": "<"},
        **{"＞": ">", "“": "", "”": "", "’": "'", "′": "'", "‘": "'"},
        **dict.fromkeys("\u00a0\u2002\u2003\u2009\u200a\u202f\u3000", " "),
        **dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u2061\u2062", ""),
        **{"×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": r"\div ", "∗": "*"},
        **{"≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ", "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "≡": r"\equiv "},
        **{"π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "°": r"^\circ "},
        **{"∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∖": r"\setminus ", "∅": r"\emptyset ", "⌀": r"\emptyset "},
        **{"±": r"\pm ", "∓": r"\mp ", "…": r"\ldots ", "⋯": r"\ldots ", "∠": r"\angle ", "⌊": r"\lfloor "},
        **{"⌋": r"\rfloor ", "⌈": r"\lceil ", "⌉": r"\rceil ", "⟨": "(", "⟩": ")", "∣": "|", "∶": ":"},
        **{"ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "ℕ": r"\mathbb{N}", "ℚ": r"\mathbb{Q}", "ℓ": r"\ell "},
        **{"α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ", "ε": r"\epsilon ", "θ": r"\theta "},
        **{"λ": r"\lambda ", "μ": r"\mu ", "ρ": r"\rho ", "σ": r"\sigma ", "φ": r"\phi ", "ω": r"\omega "},
        **{"Ω": r"\Omega ", "Δ": r"\Delta ", "τ": r"\tau ", "ξ": r"\xi ", "η": r"\eta ", "ψ": r"\psi "},
        **{"½": r"\frac12 ", "⅓": r"\frac13 ", "⅔": r"\frac23 ", "¼": r"\frac14 ", "¾": r"\frac34 "},
        **{"⅕": r"\frac15 ", "⅖": r"\frac25 ", "⅗": r"\frac35 ", "⅘": r"\frac45 ", "⅙": r"\frac16 "},
        **{"⅚": r"\frac56 ", "⅛": r"\frac18 ", "⅜": r"\frac38 ", "⅝": r"\frac58 ", "⅞": r"\frac78 "},
        **{"€": r"\text{euro}", "£": r"\text{pound}", "¥": r"\text{yen}", "￥": r"\text{yen}", "₹": r"\text{rupee}"},
        **{"¢": r"\text{cents}", "＄": r"\$", "✓": "", "✔": "", "✅": ""},
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
    }
)
_MODULUS = (
    r"(?:\s*\\[,;: ])*\s*\\(?:p|b)?mod\s*(?:\{\s*(\d+)\s*\}|(\d+))|\s*\(\s*(?:\\text\{)?\s*mod\s*\}?\s*(\d+)\s*\)"
)
# Applied in order. Most answers contain none of the marks that the first group needs, see `normalise`.
_COMMANDS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\\\\s*\[\d*\.?\d+(?:pt|em|ex|mm)\]", r"\\\\"),  # \\[4pt]
        (r"(?<!\\)\\(?:left|right)\s*\.", " "),
        (r"(?<!\\)\\(?:left|right|[bB]igg?[lrm]?|middle)(?![a-zA-Z])", ""),
        (r"\\(?:textcolor|colorbox)\s*\{[^{}]*\}|\\color\s*(?:\{[^{}]*\}|\[[^\]]*\]\{[^{}]*\})", ""),
        (r"\\(?:[hv]?phantom|label|tag\*?|hspace\*?|vspace\*?)\s*\{[^{}]*\}", ""),
        (r"\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|checkmark|mathop|mathstrut|strut)(?![a-zA-Z])", ""),
        (r"\{\s*\\(?:rm|bf|it|sf|tt|mathrm)\s+([^{}]*)\}", r"\\text{\1}"),  # {\rm cm}
        (r"\\(?:rm|bf|it|sf)\s*\{", r"\\text{"),
        (r"\\(?:nicefrac|sfrac|flatfrac|xfrac)(?![a-zA-Z])", r"\\frac"),
        (r"\\root\s*\{?(\w+)\}?\s*\\of(?![a-zA-Z])", r"\\sqrt[\1]"),
        (r"\\degree(?![a-zA-Z])|\\textdegree(?![a-zA-Z])", r"^\\circ "),
        (r"\^\s*\{\s*(?:\\circ|\\prime)\s*\}\s*\\(?:text|mathrm)\{\s*([CFK])\s*\}", r"^\\circ \1"),
        (r"\^\s*\{?\s*\\(?:text|mathrm)\{\s*(?:th|st|nd|rd)\s*\}\s*\}?", ""),  # 17^{\text{th}}
        (r"\^\s*\{?\s*\\prime\s*\}?", "'"),
        (r"\\mu\s*\\(?:text|mathrm)\{\s*(m|g|s|L|l|A|V|C|F)\s*\}", r"\\text{u\1}"),
        (
            r"\\frac\s*\{\s*\\(?:text|mathrm)\{([^{}]*)\}\s*\}\s*\{\s*\\(?:text|mathrm)\{([^{}]*)\}\s*\}",
            r"\\text{\1/\2}",
        ),
        (r"\\(?:mathbf|boldsymbol|bf)\s*\{\s*R\s*\}(?=\s*$|\s*\\(?:setminus|backslash)|\s*-\s*\\\{)", r"\\mathbb{R}"),
        (r"\\(?:mathbb|Bbb)\s+?([A-Z])(?![a-zA-Z])|\\(?:mathbb|Bbb)\s*\{\s*([A-Z])\s*\}", r"\\mathbb{\1\2}"),
        (r"\\&", r" \\land "),
        (r"\\text\s*\{\s*,?\s*(?:where|for|with|for all|for any|for some)\s*\}", ","),
        (r"\\text\s*\{\s*is an integer\.?\s*\}", r"\\in \\mathbb{Z}"),
        (r"\(\s*([a-z])\s*\\in\s*\\(?:mathbb|mathbf)\s*\{?Z\}?\s*\)$", r", \1 \\in \\mathbb{Z}"),
        (r"\\#", ""),
        (r"\\text\s*\{\s*([0-9A-F]+)\s*\}(?=\s*_\s*\{?\s*16)", r"\1"),
        (_MODULUS, r"\\mod{\1\2\3}"),
        (r"(?:\{\s*\}|(?<![\w}]))_\{?(\w{1,4}?)\}?\s*C_\{?(\w{1,4})\}?", r"\\binom{\1}{\2}"),  # {}_7C_3
        (r"(?<![A-Za-z\\])C_\{?(\d+)\}?\^\{?(\d+)\}?", r"\\binom{\1}{\2}"),
        (r"(?<![A-Za-z\\])C\^\{?(\d+)\}?_\{?(\d+)\}?", r"\\binom{\2}{\1}"),
    )
)
_NOTATIONS: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\{([,:;=+<>.-])\}", r"\1"),  # {,} is a comma without the space that TeX sets after one
        (r"(?<=\d)(?:\\!\s*,(?:\\!)?|,\\!)\s*(?=\d)", ","),
        (r"(?<=\d)(?<!\\)\\[,;: ]\s*(?=\d{3}(?!\d))|(?<=\d)~(?=\d{3}(?!\d))", ""),
        (r"(?<!\\)\\!", ""),
        (r"(?<![\d.,/\w])(\d{1,3})\s(\d{3})(?:\s(\d{3}))?(?:\s(\d{3}))?(?![\d.,/]|\s+[\d/\\])", r"\1\2\3\4"),
        (r"^([A-Za-z])\)$", r"\1"),
        (r"(?<![\w\\{])(?=[0-9A-F]*[A-F])(?:\d[0-9A-F]+|[A-F][0-9A-F]+)(?=_\{?16\}?)", r"\\hex{\g<0>}"),
        (r"(?<!\\)\\[,;:> ]|~", " "),
        (r"\+/-|\+/−", r"\\pm "),
        (r"(?<=\d)\s*[xX]\s*(?=10\s*\^)", r"\\times "),
        (r"\^\s*\{?o\}?(?=\s*$|\s*[,;)])", r"^\\circ "),  # 60^o
        (r"(?<=[)\]}])\s*U\s*(?=[(\[]|\\\{)", r"\\cup "),
        (r"\](?=\s*[-+\d\\])([^\[\](){}]*,[^\[\](){}]*)\[", r"(\1)"),  # ]a, b[ as it is written in Europe
        (r"\](?=\s*[-+\d\\])([^\[\](){}]*,[^\[\](){}]*)\]", r"(\1]"),
        (r"\[([^\[\](){}]*,[^\[\](){}]*)\[(?=\s*$|\s*\\cup|\s*,)", r"[\1)"),
        (r"(\d+\.\d{0,40}?)(\d{1,6}?)\2+\s*(?:\.\.\.|\\[lc]?dots)", r"\1\\overline{\2}"),  # 0.333...
        (r"\\dot\s*\{?(\d)\}?(\d*)\\dot\s*\{?(\d)\}?", r"\\overline{\1\2\3}"),  # 0.\dot{1}4285\dot{7}
        (r"(?<=[\d\s{}])([aApP])\.\s?[mM]\.?(?![\w])", r"\1m"),
        (r"\^\s*\{?(\d+)\}?\s*/\s*_\s*\{?(\d+)\}?", r"\\frac{\1}{\2}"),  # ^3/_5
    )
)
_PROSE = re.compile(r"(?:so |thus |hence )?(?:the )?(?:final |correct )?answer\s*(?:is|:|=)\s*", re.IGNORECASE)
_HEDGE = re.compile(
    r"(?:about|approximately|approx\.?|roughly|around|nearly|option|choice)\s+(?=[\d\\$(A-Z.-])", re.IGNORECASE
)
_REMARK = re.compile(r"(?<=[\d}\w])\s*(?:\\text\{\s*)?\(\s*(?:approx(?:\.|imately)?|exact(?:ly)?|rounded)\s*\)\s*\}?$")
_GROUPED = re.compile(r"(?<![\d.,])[1-9]\d{0,2}(?:,\d{3})+(?!\d)(?!,\d)")
_DIGITS = re.compile(rf"([{_SUPERSCRIPTS}]+)|([{_SUBSCRIPTS}]+)")
_WORD_BLANKS = re.compile(r"(?<=\w)\s+(?=\w)|\s+")
_CURRENCY_BEFORE = re.compile(r"(-?)\s*(?:USD|US)\s*(?=\\\$|-?[\d.])")
_CHOICE_LETTER = re.compile(r"\([A-J]\)|(?<!\w)[A-J][.):]\s")
_CHOICE = re.compile(
    r"(?:(?:\\(?:text(?:bf|rm|it)?|math(?:rm|bf|sf))\s*\{\s*)?\((?P<styled>[A-J])\)\s*\}?|(?P<plain>[A-J])[.):](?=\s))"
    r"(?:\s|~|\\[,;: ]|\\q?quad|[.:])*(?P<value>[^\s.:].*)",
    re.DOTALL,
)
_ROWS = re.compile(r"\\begin\{(cases|aligned|align\*?|gathered)\}(.*?)\\end\{\1\}", re.DOTALL)
_WRAPPED = re.compile(r"\\text(?:bf|rm|it)?\{([^{}]*)\}")
_OPERATOR = re.compile(r"\s*\\(?:lim|sum|prod|i?i?int|oint|max|min|sup|inf|det|arg)(?![a-zA-Z])")


def squeezed(text: str) -> str:
    """Without the blanks that do not separate two words or numbers."""
    return _WORD_BLANKS.sub(lambda match: " " if match[0] and _between_words(match) else "", text.strip())


def _between_words(match: re.Match[str]) -> bool:
    text, start, end = match.string, match.start(), match.end()
    return start > 0 and end < len(text) and _word(text[start - 1]) and _word(text[end])


def _word(char: str) -> bool:
    return char.isalnum() or char == "_"


def normalise(raw: str) -> str:
    """One spelling for what is only typesetting. Raises Unreadable for a text of more than `MAX_CHARS`."""
    if len(raw) > MAX_CHARS:
        raise Unreadable(f"longer than {MAX_CHARS} characters")
    text = raw.strip().strip("`").strip()
    if not text.isascii():
        text = _DIGITS.sub(_script, text).translate(_UNICODE).strip()
    text = _unquoted(re.sub(r"^\*+\s*|\s*\*+$", "", text))
    text = _PROSE.sub("", text, count=1) if _PROSE.match(text) else text
    text = _HEDGE.sub("", text, count=1) if _HEDGE.match(text) else text
    text = _REMARK.sub("", text)
    if "\\" in text or "_" in text or "(" in text:
        for pattern, replacement in _COMMANDS:
            text = pattern.sub(replacement, text)
    for pattern, replacement in _NOTATIONS:
        text = pattern.sub(replacement, text)
    text = _ROWS.sub(_listed, text) if r"\begin" in text else text
    text = _money(_CURRENCY_BEFORE.sub(r"\1\\$", text))
    text = re.sub(r"(?<!\\)\\[()\[\]]", " ", text)
    text = re.sub(r"(?:\\\\\s*)+$", "", text.strip())
    return re.sub(r"(?<!\.)\\?[.;,:]$", "", text.strip()).strip()


def _listed(match: re.Match[str]) -> str:
    """A system of equations as a list."""
    return re.sub(r"\\\\\s*$", "", match[2].strip()).replace("\\\\", ", ").replace("&", " ")


def _script(match: re.Match[str]) -> str:
    if match[1]:
        return f"^{{{match[1].translate(_PLAIN_OF_SUPERSCRIPT)}}}"
    return f"_{{{match[2].translate(_PLAIN_OF_SUBSCRIPT)}}}"


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


def _money(text: str) -> str:
    r"""`\$`, or a lone `$` before a digit, is the currency; other dollar signs delimit mathematics."""
    if "$" not in text:
        return text
    lone = text.count("$") - text.count(r"\$") == 1
    if lone:
        text = re.sub(r"(?<!\\)\$(?=\s*-?[\d.])", r"\\$", text)
    text = re.sub(r"(?<!\\)\$", " ", text)
    return re.sub(r"-\s*\\\$|\\\$\s*-", r"\\dollar -", text).replace(r"\$", r"\dollar ")


def readings(raw: str) -> list[str]:
    """The normalised text with grouping commas removed and, where that differs, with its commas as they are."""
    text = normalise(raw)

    def ungroup(match: re.Match[str]) -> str:
        before = text[: match.start()]
        depth = sum(map(before.count, ("(", "[", r"\{"))) - sum(map(before.count, (")", "]", r"\}")))
        plain_list = depth > 0 and not any(part[0] == "0" for part in match[0].split(",")[1:])
        return match[0] if plain_list else match[0].replace(",", "")

    joined = _GROUPED.sub(ungroup, text)
    return [joined] if joined == text else [joined, text]


def option(raw: str) -> tuple[str, str] | None:
    r"""Letter and value of a multiple-choice answer that gives both: `\textbf{(B)}\ 12`, `(B) 12`, `B. 12`."""
    text = _WRAPPED.sub(r"\1", raw.strip())
    match = _CHOICE.fullmatch(text)
    if match is None or _CHOICE_LETTER.search(match["value"]):
        return None
    return match["styled"] or match["plain"], match["value"]


def right_side(text: str) -> str | None:
    r"""What stands after the last equals sign when the text names its answer by a limit, sum, integral or extremum."""
    if not _OPERATOR.match(text):
        return None
    depth = 0
    for position in range(len(text) - 1, -1, -1):
        depth += (text[position] in ")}]") - (text[position] in "({[")
        if depth == 0 and text[position] == "=":
            return text[position + 1 :].strip() or None
    return None
