r"""Numbers as people and models write them.

    72   -3   .67   1,234.50   1.234,50   1 234   1_000   0,5   1e3   1.5 x 10^3   2 million
    3/4   1 1/2   ½   \frac{3}{4}   $72   72 €   50% (as 50)   1{,}000   \$72   45^\circ
    negative 3   2k   10**3   72 dollars   ７２

A comma between groups of three digits separates thousands, `1,234`; any other is a decimal comma.
What looks like part of something longer is no number: `1.2.3`, `2^10`, a list `1,2,3`.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

LONGEST = 100  # characters of a number
CURRENCY = "$€£¥₹"
FACTORS = {"hundred": 2, "thousand": 3, "lakh": 5, "million": 6, "crore": 7, "billion": 9}
FACTORS["trillion"] = 12
_EXPONENTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")

# Other spellings of what _NUMBER reads, in the order in which they are replaced.
_SPELLINGS: dict[str, str | Callable[[re.Match[str]], str]] = {
    r"(?![0-9])\d": lambda found: str(unicodedata.decimal(found[0])),  # of other scripts
    "[\N{FULLWIDTH COMMA}\N{ARABIC THOUSANDS SEPARATOR}]": ",",
    "[\N{FULLWIDTH FULL STOP}\N{ARABIC DECIMAL SEPARATOR}]": ".",
    "[\N{MINUS SIGN}\N{EN DASH}]": "-",
    r"\bUS(?=\$)|[\"“”\u200b\ufeff]": "",
    r"\\[,;: ]|~|[\N{NO-BREAK SPACE}\N{THIN SPACE}\N{NARROW NO-BREAK SPACE}]": " ",
    r"(?i)\b(?:(?:us )?dollars?|euros?|usd|eur)(?![a-z])": "$",
    r"(?i)(?<=[0-9]) per ?cent\b": "%",
    r"(?<=[0-9]) and a half\b": " 1/2",
    r"(?<=[0-9]) and (?=[0-9]+/[0-9])": " ",
    # A sign apart from its number, where nothing can be subtracted from.
    r"(?i)\bnegative (?=[$.0-9])": "-",
    r"(?i)(^ ?|\b(?:is|was|be|get|gives|equals) |['’]s |[=:(] ?)(?:minus|-) (?=[$.0-9])": r"\1-",
    r"^\s*(?:[A-Za-z] ?)?(?:[=≈]|\\approx) ?": "",
    r"^\s*,(?=[0-9])": "0.",
    r"(?<=[0-9])\*\*(?=-?[0-9])": "^",
    r"\\([$%])": r"\1",
    r"\^\{?\\circ\}?": "°",
    r"\\!": "",
    r"\{,\}": ",",
    r"\\times|\\cdot|[·*]": "×",
    r"(?<=[0-9])(?=\\[dt]?frac|[¼-¾⅐-⅞])": " ",  # 1½ is 1 1/2
    r"\\[dt]?frac(?:\{(-?[0-9][0-9.,]*)\}\{(-?[0-9]+)\}| ?([0-9])([0-9]))": r"\1\3/\2\4",
    # No value: not what is in it.
    r"\\(?:[dt]?frac|sqrt)(?: ?[0-9]|(?:\{[^{}]*\}|\[[^][]*\])*)": "1/0",
    r"(\\[A-Za-z]+)(?=[0-9])": r"\1 ",
    r"[¼-¾⅐-⅞]": lambda found: unicodedata.normalize("NFKC", found[0]),
    "\N{FRACTION SLASH}": "/",
    r"(?<=[0-9])[⁰¹²³⁴-⁹⁻]+": lambda found: "^" + found[0].translate(_EXPONENTS),
    r"(?<=[0-9]\^)\{(-?[0-9]+)\}": r"\1",
}
_THOUSANDS = r"[1-9]\d{0,2}(?:,\d{2,3})*,\d{3}"  # or as in 1,00,000
_NUMBER = re.compile(
    rf"""
    (?P<sign> (?<![\w)\]}}])[-+] )? (?: [{CURRENCY}]\ ? )? (?P<inner> (?<=[{CURRENCY}])- )?
    (?<! \d ) (?<! \d[.,/'’_^eE] ) (?<! \d[eE][-+] ) (?<! \^ ) (?<! \^[-{{] )
    (?<! [A-WYZa-wyz] )  # m2 and H2O are words; x2 may be a product
    (?:
        (?P<whole> \d+ )\ (?P<part> \d+/\d+ )
      |
        (?P<digits>
            {_THOUSANDS} (?: \.\d+ )?
          | [1-9]\d{{0,2}} (?: (?: \.\d{{3}} )+ ,\d+ | (?: \.\d{{3}} ){{2,}} )
          | [1-9]\d{{0,2}} (?P<gap> [ '’_] ) \d{{3}} (?: (?P=gap)\d{{3}} )* (?: [.,]\d+ )?
          | \d+ (?: [.,]\d+ | \.(?=[eE][-+]?\d) )?
          | (?<! [\w.] ) \.\d+
        )
        (?:
            [eE] (?P<e> [-+]?\d{{1,3}} )
          | \ ?[x×]\ ?10\^ (?P<power> -?\d{{1,3}} )
          | \ ?/\ ? (?P<below> -?\d+ )
          | (?P<factor> [kKM] | \ (?i: {"|".join(FACTORS)} )s? )\b
          | \^ (?P<ten> -?\d{{1,3}} )
        )?
    )
    (?! \d | [.,/'’_]\d | \^ | [eE][-+]?\d )
    """,
    re.VERBOSE | re.ASCII,
)


def as_number(text: str) -> Fraction | None:
    """The value of a text that is one number, see above; else None."""
    found = _NUMBER.fullmatch(_respelled(text).strip().rstrip(f".,;%° {CURRENCY}"))
    return None if found is None else _value(found)


def last_number(text: str) -> Fraction | None:
    """The value of the last number in a text; None if there is none, or it has no value, as 1/0."""
    found = list(_NUMBER.finditer(_respelled(text)))
    return _value(found[-1]) if found else None


def _respelled(text: str) -> str:
    for pattern, replacement in _SPELLINGS.items():
        text = re.sub(pattern, replacement, text)
    return text


def _value(found: re.Match[str]) -> Fraction | None:
    if len(found[0]) > LONGEST:
        return None
    sign = -1 if "-" in (found["sign"], found["inner"]) else 1
    try:
        if found["whole"]:
            part = Fraction(found["part"])
            return sign * (int(found["whole"]) + part) if part < 1 else None
        if found["ten"]:  # a power of another base is no number
            return sign * Fraction(10) ** int(found["ten"]) if found["digits"] == "10" else None
        value = Fraction(_decimal(found["digits"])) / int(found["below"] or 1)
    except ZeroDivisionError:
        return None
    factor = (found["factor"] or "").strip().lower().rstrip("s")
    power = found["e"] or found["power"] or FACTORS.get(factor) or {"k": 3, "m": 6}.get(factor, 0)
    return sign * value * Fraction(10) ** int(power)


def _decimal(digits: str) -> str:
    """Digits without what separates groups, and with a point as the decimal mark."""
    digits = re.sub("[ '’_]", "", digits)
    if re.fullmatch(_THOUSANDS + r"(?:\.\d+)?", digits):
        return digits.replace(",", "")
    if "," in digits or digits.count(".") > 1:
        return digits.replace(".", "").replace(",", ".")
    return digits
