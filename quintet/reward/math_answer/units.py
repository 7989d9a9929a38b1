"""Units of measure: spellings to one canonical name each."""

from __future__ import annotations

import re

from quintet.reward.math_answer.tree import names

_SPELLINGS = {
    "mm": "millimeter millimeters millimetre millimetres",
    "cm": "centimeter centimeters centimetre centimetres",
    "dm": "decimeter decimeters",
    "m": "meter meters metre metres",
    "km": "kilometer kilometers kilometre kilometres",
    "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yards",
    "mi": "mile miles",
    "mg": "milligram milligrams",
    "g": "gram grams",
    "kg": "kilogram kilograms",
    "lb": "lbs pound-mass",
    "oz": "ounce ounces",
    "ml": "milliliter milliliters mL",
    "l": "liter liters litre litres",
    "ms": "millisecond milliseconds",
    "s": "sec secs second seconds",
    "min": "mins minute minutes",
    "h": "hr hrs hour hours",
    "day": "days",
    "week": "weeks",
    "month": "months",
    "year": "yr yrs years",
    "dollar": "dollars usd",
    "cent": "cents",
    "euro": "euros eur",
    "pound": "pounds gbp",
    "yen": "jpy",
    "degree": "degrees deg",
    "percent": "percents",
    "mph": "mph",
    "kph": "kmh",
    "unit": "units",
    "rad": "radian radians",
    "hz": "hertz",
    "kwh": "kwh",
    "mol": "mole moles",
    "pa": "pascal pascals",
    "kj": "kilojoule kilojoules",
    "j": "joule joules",
    "n": "newton newtons",
    "w": "watt watts",
    "v": "volt volts",
}
CURRENCIES = names("dollar euro pound yen")
SINGLE_LETTERS = frozenset("msghLNJWV")
UNITS = {spelling.lower(): unit for unit, others in _SPELLINGS.items() for spelling in (unit, *others.split())}
_POWERS = {"square": "^2", "squared": "^2", "sq": "^2", "cubic": "^3", "cubed": "^3"}


def canonical_unit(words: str) -> str:
    """`square  centimeters` and `cm^2` are one unit; a word that is no known unit counts without its plural."""
    factors: list[str] = []
    power = ""
    for part in re.findall(r"[^\s/*^{}()\d-]+|/|\^\{?-?\d+\}?", words.replace(" per ", " / ").lower()):
        if part in _POWERS and factors and part.endswith("ed"):
            factors[-1] += _POWERS[part]
        elif part in _POWERS:
            power = _POWERS[part]
        elif part.startswith("^"):
            factors[-1:] = [f + "^" + part.strip("^{}") for f in factors[-1:]]
        elif part != "of":
            known = part == "/" or part in UNITS
            factors.append((UNITS.get(part, part) if known else re.sub(r"(?<=\w\w)s$", "", part)) + power)
            power = ""
    return " ".join(factors)
