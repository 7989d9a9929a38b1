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
    "rupee": "rupees inr",
    "yuan": "rmb cny",
    "am": "",
    "pm": "",
    "celsius": "",
    "fahrenheit": "",
    "acre": "acres",
    "gallon": "gallons gal",
    "ton": "tons tonne tonnes",
    "mpa": "",
    "kpa": "",
    "kw": "",
    "ohm": "ohms",
    "amp": "amps ampere amperes",
    "atm": "",
    "bit": "bits",
    "byte": "bytes",
    "degree": "degrees deg",
    "percent": "percents",
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
CURRENCIES = names("dollar euro pound yen rupee yuan")
SINGLE_LETTERS = frozenset("msghLNJWVK") | {"Omega"}
UNITS = {spelling.lower(): unit for unit, others in _SPELLINGS.items() for spelling in (unit, *others.split())} | {
    "mph": "mph",
    "kph": "kph",
    "kmh": "kph",
}
_COMPOUND = {"mph": {"mi": 1, "h": -1}, "kph": {"km": 1, "h": -1}, "kmh": {"km": 1, "h": -1}}
_POWERS = {"square": 2, "squared": 2, "sq": 2, "cubic": 3, "cubed": 3}
_PART = re.compile(r"[^\W\d_]+|/|\^\s*\{?\s*-?\d+\s*\}?")


def canonical_unit(words: str) -> str:
    """`square  centimeters` and `cm^2` are one unit, so are `m/s^2` and `m s^-2`; a word that is no known unit counts
    without its plural."""
    powers: dict[str, int] = {}
    last: list[str] = []  # the factors that a following power or `squared` belongs to
    sign, ahead = 1, 1
    for part in _PART.findall(words.lower()):
        if part in ("/", "per"):
            sign, last = -1, []
        elif part.startswith("^") or (part in ("squared", "cubed") and last):
            exponent = _POWERS.get(part) or int(part.strip("^{} \t"))
            powers.update({name: powers[name] * exponent for name in last})
        elif part in _POWERS:
            ahead = _POWERS[part]
        elif part not in ("of", "a", "an", "the", "each"):
            last = []
            for name, power in _COMPOUND.get(part, {_singular(part): 1}).items():
                powers[name] = powers.get(name, 0) + power * sign * ahead
                last.append(name)
            ahead = 1
    return " ".join(name if power == 1 else f"{name}^{power}" for name, power in sorted(powers.items()))


def _singular(word: str) -> str:
    return UNITS.get(word) or re.sub(r"(?<=\w\w)s$", "", word)
