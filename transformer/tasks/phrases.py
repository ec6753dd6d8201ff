# ruff: noqa: E501 - a sentence pattern stands on one line
"""The many ways to put a question: sentence patterns and what people do to them.

A pattern is a sentence with alternatives in parentheses, `(what is|what's) {a} plus {b}`, expanded at random; the
operands in braces are filled in last, so that neither capitals nor typing errors ever touch them.
"""

import re
from collections.abc import Callable, Sequence
from random import Random

ASK = (
    "(what is|what is|what's|whats|how much is|calculate|compute|work out|evaluate|solve|find|tell me"
    "|give me|can you compute|could you work out|do you know|i need|i want to know)"
)
LARGER = "(bigger|larger|greater|higher)"
SMALLER = "(smaller|lower|less)"
NUMBER = "(|| number| one)"
WORD = "(|the word |the word |the string |)"
ASCENDING = "(in ascending order|from smallest to largest|ascending|from low to high|smallest first|in order)"
DESCENDING = "(in descending order|from largest to smallest|descending|from high to low|largest first|in reverse order)"

ADD = (
    "{a}+{b}",
    "{a}( + | +|+ ){b}(|| =)",
    ASK + " {a}(+| + | + ){b}",
    ASK + " {a} plus {b}",
    "{a} plus {b}",
    "{a} added to {b}",
    "add {a} (and|to|plus|with) {b}",
    "add (the numbers |){a} and {b}( together| up|)",
    ASK + " the (sum|total) of {a} and {b}",
    "(the |)sum of {a} and {b}",
    "(what do (you|i) get|what comes out|what is it) (if|when) (you|i|we) add {a} (and|to) {b}",
    "if (you|i|we) add {b} to {a}(,|) what (do (you|i|we) get|is the result|is it)",
    "i have {a} (apples|coins|euros|books|cards) and (get|buy|find) {b} more(,|.) how many (do i have|is that)",
    "(how much|how many|what) (is|are) {a} and {b} (together|in total|combined)",
    "increase {a} by {b}",
)
SUBTRACT = (
    "{a}-{b}",
    "{a}( - | -|- | – | − ){b}(|| =)",
    ASK + " {a}(-| - | - ){b}",
    ASK + " {a} minus {b}",
    "{a} minus {b}",
    "{a} (take away|less) {b}",
    "subtract {b} from {a}",
    "take {b} (away |)from {a}",
    "(what do (you|i) get|what is left|what remains) (if|when) (you|i|we) (take|subtract) {b} from {a}",
    "decrease {a} by {b}",
    "i have {a} (apples|coins|euros|books|cards) and (lose|spend|give away) {b}(,|.) how many are left",
    "if (you|i|we) subtract {b} from {a}(,|) what (do (you|i|we) get|is the result|is it)",
)
MULTIPLY = (
    "{a}(*|x|×| * | x | × |·){b}(|| =)",
    ASK + " {a}(*| * | x | × |x){b}",
    ASK + " {a} times {b}",
    "{a} times {b}",
    "multiply {a} (by|and|with) {b}",
    ASK + " {a} multiplied by {b}",
    ASK + " the product of {a} and {b}",
    "(the |)product of {a} and {b}",
    "{a} (groups|bags|boxes) of {b}(,|.) how many (is that|in total)",
)
COMPARE = {
    "larger": (
        f"which{NUMBER} is {LARGER}(,|:|) {{a}} or {{b}}",
        f"what is {LARGER}(,|:|) {{a}} or {{b}}",
        f"{{a}} or {{b}}(, |: | ? )which{NUMBER} is {LARGER}",
        "(what is |find |pick |)the (larger|bigger|greater|higher)( number|) of {a} and {b}",
        "(what is |)(the |)max(imum|) of {a} and {b}",
    ),
    "smaller": (
        f"which{NUMBER} is {SMALLER}(,|:|) {{a}} or {{b}}",
        f"what is {SMALLER}(,|:|) {{a}} or {{b}}",
        f"{{a}} or {{b}}(, |: | ? )which{NUMBER} is {SMALLER}",
        "(what is |find |pick |)the (smaller|lower|lesser)( number|) of {a} and {b}",
        "(what is |)(the |)min(imum|) of {a} and {b}",
    ),
    "greater?": (f"is {{a}} {LARGER} than {{b}}", "is {a} more than {b}", "is {a}( > |>){b}"),
    "less?": (f"is {{a}} {SMALLER} than {{b}}", "is {a} fewer than {b}", "is {a}( < |<){b}"),
    "compare": ("compare {a} (and|with|to) {b}", "compare the numbers {a} and {b}"),
}
SORT = {
    "ascending": (
        "sort {numbers}",
        "sort (the numbers |these numbers: |these: |this list: |){numbers}",
        f"sort (the numbers |){{numbers}} {ASCENDING}",
        f"(put|arrange|order) (the numbers |){{numbers}} {ASCENDING}",
        "order (the numbers |these numbers: |){numbers}",
        "can you sort (the numbers |){numbers}( for me|)",
    ),
    "descending": (
        f"sort (the numbers |){{numbers}} {DESCENDING}",
        f"(put|arrange|order) (the numbers |){{numbers}} {DESCENDING}",
        f"sort {DESCENDING}: {{numbers}}",
    ),
}
REVERSE = (
    f"reverse {WORD}{{word}}",
    "reverse {word}",
    "reverse the (letters|characters|digits) (of|in) {word}",
    f"(spell|write|say|read) {WORD}{{word}} (backwards|backward|in reverse|from right to left)",
    f"(what is|what's) {WORD}{{word}} (backwards|reversed|in reverse|spelled backwards)",
    "{word} (backwards|reversed|in reverse)",
    f"(flip|turn around|mirror) {WORD}{{word}}",
    f"how do (you|i) (spell|write) {WORD}{{word}} backwards",
)
COUNT = (
    "how many {letter}('s|s|) (are there|are|is) in (|the word ){word}",
    "how many (|letters |letter ){letter}('s|s|) does (|the word ){word} (have|contain)",
    "how (often|many times) does (|the letter ){letter} (appear|occur|come up) in (|the word ){word}",
    "count (|the |the letter ){letter}('s|s|) in (|the word ){word}",
    "(what is |)the number of {letter}('s|s|) in (|the word ){word}",
    "how many times is (the letter |){letter} in (|the word ){word}",
)
FOLLOW_UP = {
    "add": (
        "(|and |now |then |ok, )(plus|add|+) {b}",
        "(and |now |)(what is|what's) (that|it) plus {b}",
        "(and |now |)add {b} (to (that|it)|more)",
        "and {b} more",
        "(and |)if (i|you) add {b}",
    ),
    "subtract": (
        "(|and |now |then |ok, )(minus|subtract|take away|less) {b}",
        "(and |now |)(what is|what's) (that|it) minus {b}",
        "(and |now |)(subtract|take) {b} (from (that|it)|away)",
        "and {b} less",
        "(and |)if (i|you) take away {b}",
    ),
    "multiply": (
        "(|and |now |then |ok, )(times|multiply by|multiplied by) {b}",
        "(and |now |)(what is|what's) (that|it) times {b}",
        "(and |now |)multiply (that|it) by {b}",
    ),
}

LEADS = (
    *(
        "please ",
        "hey, ",
        "hi, ",
        "hello, ",
        "hi! ",
        "ok, ",
        "so ",
        "now ",
        "well, ",
        "quick question: ",
    ),
    *(
        "can you help me? ",
        "i have a question: ",
        "hey there, ",
        "question: ",
        "um, ",
        "one more: ",
        "and ",
    ),
    *(
        "could you please ",
        "can you ",
        "good morning, ",
        "yes, ",
        "no, ",
        "thanks, ",
        "great! ",
        "Q: ",
    ),
)
TAILS = ("?", "?", "?", "?", "?", "", "", "", "", ".", " ?", "!", " please", ", please", " please?")
RARE_TAILS = (
    *(
        "??",
        "...",
        " thanks",
        ", thank you",
        " :)",
        " now",
        "?!",
        " = ?",
        "\n",
        " ",
        " for me",
        " quickly",
    ),
    *(
        " i need it for school",
        ", my friend",
        " pls",
        " plz?",
        ", can you?",
        " if you can",
        " right now",
    ),
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful assistant.",
    "You are a careful calculator.",
    "Answer briefly.",
    "Be concise.",
    "You are a friendly maths tutor.",
    "Think step by step before you answer.",
    "You are a small demo model.",
    "Be polite and precise.",
    "You are Bob, an expert in arithmetic.",
    "Give the answer only.",
    "You are an AI assistant. Answer the user's question as well as you can.",
    "The user is a child. Be patient.",
    "You are a helpful, honest and harmless assistant.",
    "Always answer in English.",
    "Do not make things up.",
    "You are a pirate.",
    "Today is Monday.",
)

UNITS, TENS = (
    words.split()
    for words in (
        "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen "
        "fifteen sixteen seventeen eighteen nineteen",
        "twenty thirty forty fifty sixty seventy eighty ninety",
    )
)

_alternatives = re.compile(r"\(([^()]*)\)")
_operand = re.compile(r"(\{\w+\})")


def expand(rng: Random, pattern: str) -> str:
    """One of the sentences that a pattern stands for."""
    while "(" in pattern:
        pattern = _alternatives.sub(lambda group: rng.choice(group[1].split("|")), pattern)
    return pattern


def say(rng: Random, patterns: Sequence[str], **operands: object) -> str:
    """A question from one of some patterns, as somebody might type it, with its operands filled in."""
    return dress(rng, expand(rng, rng.choice(patterns)), **operands)


def dress(rng: Random, sentence: str, **operands: object) -> str:
    """A plain lower-case sentence as somebody might type it: a polite start, an ending, capitals, typing errors."""
    chance = rng.random
    if chance() < 0.15:
        sentence = rng.choice(LEADS) + sentence
    sentence += rng.choice(TAILS if chance() < 0.85 else RARE_TAILS)
    if chance() < 0.5:
        sentence = sentence[:1].upper() + sentence[1:]
    elif chance() < 0.06:
        sentence = _between_operands(sentence, str.upper)
    if chance() < 0.05:
        sentence = _between_operands(sentence, lambda text: mistype(rng, text))
    for name, value in operands.items():
        sentence = sentence.replace("{" + name + "}", str(value))
    return sentence


def _between_operands(sentence: str, change: Callable[[str], str]) -> str:
    parts = _operand.split(sentence)
    parts[::2] = [change(part) for part in parts[::2]]
    return "".join(parts)


def mistype(rng: Random, text: str) -> str:
    """A text with one letter dropped, doubled, replaced or exchanged with the next one."""
    places = [i for i, character in enumerate(text) if character.isalpha()]
    if not places:
        return text
    i = rng.choice(places)
    error = rng.randrange(4)
    if error == 0:
        return text[:i] + text[i + 1 :]
    if error == 1:
        return text[:i] + text[i] + text[i:]
    if error == 2:
        return text[:i] + rng.choice("abcdefghijklmnopqrstuvwxyz") + text[i + 1 :]
    return text[:i] + text[i + 1 : i + 2] + text[i] + text[i + 2 :]


def number_text(rng: Random, number: int) -> str:
    """A number as somebody might write it: mostly digits, now and then `1,234` or, up to 99, words."""
    if rng.random() > 0.05 or number < 0:
        return str(number)
    if number < 20:
        return UNITS[number]
    if number < 100:
        tens = TENS[number // 10 - 2]
        return f"{tens}{rng.choice(' -')}{UNITS[number % 10]}" if number % 10 else tens
    return f"{number:,}"


def quote(rng: Random, word: str) -> str:
    """A word as somebody might set it off: bare, mostly, or in quotation marks."""
    mark = rng.choice(("", "", "", "", '"', "'"))
    return f"{mark}{word}{mark}"


def system_prompt(rng: Random) -> str | None:
    """What stands before the conversation: nothing, mostly."""
    return rng.choice(SYSTEM_PROMPTS) if rng.random() < 0.25 else None
