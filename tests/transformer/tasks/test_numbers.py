"""Numbers in every spelling, alone and at the end of a sentence."""

import time
from fractions import Fraction

import pytest

from transformer.tasks.numbers import as_number, last_number

SAME = {
    "72": ("72", "72.", "72.0", "+72", "$72", r"\$72", "72€", "72 €", "72%", r"72\%", "144/2"),
    "72.0": ("$ 72", "US$72", "72 dollars", "EUR 72", "72 per cent", "٧٢", "７２", "-144/-2"),
    "72.00": ("x = 72", "=72", '"72"', "72;", r"\approx 72", "USD72", "72\u200b"),
    "-3.0": ("negative 3", "Negative $3", "6/-2"),
    "-3": ("-3", "-3.0", "\N{MINUS SIGN}3", "\N{EN DASH}3", "-$3", "$-3", "-6/2", r"-\frac{6}{2}"),
    "0.67": (".67", "0.67", "0,67", "$.67", "67/100", "٠٫٦٧"),
    "0.670": ("67e-2", "6.7E-1", r"\frac{67}{100}", r"\frac{6.7}{10}"),
    "-0.5": ("-.5", "-0,5", "-1/2", "-½", "-5e-1", r"-\frac12", r"\frac{-1}{2}", r"-\frac 12"),
    "-0.50": (r"\frac{1}{-2}", "negative .5"),
    "1000": ("1e3", "1E+3", "1.0e3", "1.e3", "1,000", "1,000.00", "１，０００"),
    "1000.00": (r"1{,}000", r"1,\!000", r"1\,000", "1 000"),
    "1000.0": ("1 000", "1\N{NARROW NO-BREAK SPACE}000", "1_000", "1'000", "1’000", "10³", "10**3"),
    "1500": ("1.5e3", "1.5x10^3", "1.5 × 10³", "1.5*10^3", r"1.5 \times 10^{3}", "1.5 thousand"),
    "0.0015": ("1.5e-3", "1.5 × 10⁻³", r"1.5\cdot10^{-3}", "0,0015"),
    "1234.5": ("1,234.50", "1.234,50", "1 234,5", "1234,5", "1'234.5", "2469/2", "2469 / 2"),
    "1234567": ("1,234,567", "12,34,567", "1.234.567", "1 234 567", "1_234_567"),
    "1.5": ("1,5", "1½", "1 1/2", "1 and a half", "1 ½", r"1\frac{1}{2}", r"1\dfrac12", "1.5°"),
    "1.234": ("1.234", "1,2340"),
    "1.50": ("1.5", "3/2", "1 and 1/2"),
    "45": ("45°", r"45^\circ", r"45^{\circ}", "4,5e1"),
    "2000000": ("2 million", "2 Millions", "2M", "$2M", "2e6", "0.002 billion", "20 lakh"),
    "2000": ("2k", "2K", "20 hundred", "2*10**3"),
}
NONE = ("", "x", "1 2", "--1", "1.2.3", "1,2,3", "1/0", "2^10", "110^3", "1e9999", "1e5.5", "9:30")
NONE += ("9" * 5000, "72 or 73", "12 1/0", "1 3/2", "seven", "5-3")


@pytest.mark.parametrize(
    "text, value", [(text, value) for value, texts in SAME.items() for text in texts]
)
def test_every_spelling(text, value):
    assert as_number(text) == as_number(f" {text} ") == Fraction(value)
    for sentence in ("It is %s", "Not 7, but %s, of course.", "x = %s\n", "(%s)", "Is it %s?"):
        assert last_number(sentence % text) == Fraction(value), sentence


@pytest.mark.parametrize("text", NONE)
def test_what_is_no_number(text):
    assert as_number(text) is None


@pytest.mark.parametrize(
    "text, value",
    {
        "80-8=72": 72,
        "from 5-72": 72,
        "x^2 = 72": 72,
        "done.67": 67,  # the end of a sentence
        "...67": 67,
        "7 - 5": 5,
        "7 minus 5": 5,
        "minus 5": -5,
        "- 5": -5,
        ",5": 0.5,
        "It is minus 5": -5,
        "so x = - 5.": -5,
        "it's minus 5": -5,
        "-\N{NO-BREAK SPACE}5": -5,
        "25 m2": 25,
        "H2O": None,
        r"\Rightarrow72": 72,
        "the list: 1 ,5": 5,
        "5km": 5,
        "1, 2, 3": 3,
        "the 3rd": 3,
        "1.2.3": None,
        "2^10": None,
        "7 or 2^10": None,
        "2^{10}": None,
        "5²": None,
        "0.10^3": None,
        "72 m²": 72,
        "1e9999": None,
        r"\sqrt{2}": None,
        r"\sqrt2": None,
        r"2\sqrt[3]{2}": None,
        r"\frac{x}{2}": None,
        r"\sqrt{4} = 2": 2,
        "no number": None,
    }.items(),
)
def test_the_last_number(text, value):
    assert last_number(text) == value


@pytest.mark.parametrize(
    "part", ["1", "1 000 ", "1,", "1 1/", "{", "\\", "10^{", "1_", " ", "-", "."]
)
def test_a_long_text_takes_no_time(part):
    started = time.process_time()
    last_number("5" + part * 30_000 + "^")
    assert time.process_time() - started < 5
