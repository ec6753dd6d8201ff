"""Noted arithmetic gives for other numbers what the function itself gives, or nothing."""

import random

import pytest

from flash_versions.dispatch.replay.traced import Trace, Traced

COMPARED = "<", "<=", ">", ">=", "==", "!="
CONSTANTS = "0", "1", "2", "3", "7", "16", "64", "128"


def program(rng):
    """The source of a function of four numbers, of operations drawn by lot."""
    lines, names = ["def function(a, b, c, d):"], ["a", "b", "c", "d"]
    for i in range(rng.randrange(3, 14)):
        x, y = rng.choice(names), rng.choice([*names, rng.choice(CONSTANTS)])
        form = rng.choice([
            *(f"{{x}} {operation} {{y}}" for operation in "+-*"), "{x} // {y} if {y} > 0 else {x}",
            "{x} % {y} if {y} > 0 else {x}", "min({x}, {y})", "max({x}, {y})", "-{x}",
            "-(-{x} // 64)", "1 << ({x} % 20).bit_length()", "sum(range({x} % 5))", "abs({x})",
            "{x} if 1.04 * {x} < 3 * {y} else {y}", "{x} + 1 if {x} % 16 == 0 else {y}",
            *(f"{{x}} + 5 if {{x}} {compared} {{y}} else {{y}} * 3" for compared in COMPARED),
        ])  # fmt: skip
        lines.append(f"    v{i} = {form.format(x=x, y=y)}")
        names.append(f"v{i}")
    return "\n".join([*lines, f"    return {', '.join(names[-4:])}"])


def draw(rng):
    """Four numbers, of which some are equal, small, or multiples of others."""
    numbers = [rng.choice([0, 1, 2, 16, 64, 100, 128, rng.randrange(5000)]) for _ in range(4)]
    return [numbers[0], *numbers[:3]] if rng.random() < 0.4 else numbers


@pytest.mark.parametrize("first", range(0, 400, 100))
def test_what_is_noted_is_what_the_function_does(first):
    served = 0
    for seed in range(first, first + 100):
        rng, names = random.Random(seed), {}
        exec(source := program(rng), names)
        function, given, trace = names["function"], draw(rng), Trace()
        results = function(*[trace.take(n, f"given[{i}]") for i, n in enumerate(given)])
        assert tuple(x.value if type(x) is Traced else x for x in results) == function(*given)
        known = [trace.known(x) for x in results]
        needed, body = trace.source([x for x in known if isinstance(x, str)])
        taken = f"{', '.join(['_', *needed])} = {', '.join(['None', *needed.values()])}"
        lines = "def again(given):", taken, *body, f"return {', '.join(map(str, known))}"
        exec("\n    ".join(lines), names)
        assert names["again"](given) == function(*given), source
        for _ in range(30):
            others = draw(rng)
            found = names["again"](others)
            served += found is not None
            assert found in (None, function(*others)), (source, given, others, lines)
    assert served > 500


def test_a_number_that_outlives_its_trace_is_a_number():
    trace = Trace()
    n = trace.take(12, "given")
    trace.is_open = False
    assert (n + 1, n * 2, [*range(5)][n // 4], {12: "twelve"}[n]) == (13, 24, 3, "twelve")
    assert n > 3 and f"{n}" == "12" and not trace.lines
