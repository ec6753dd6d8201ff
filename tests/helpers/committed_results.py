"""The committed results, and what the tests of tables and figures look up in them."""

from flash_versions.bench import results

RESULTS = results.read_results()
UNITS = {"decode": "tb_per_s", "quantize": "tb_per_s"}


def cells(table, first):
    """{header: cell} of the row of a table that begins with `first`."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    [row] = [line for line in lines if line[0] == first]
    return dict(zip(lines[0], row))


def without(wanted, source=RESULTS):
    """A document without the rows that `wanted` refuses."""
    return source | {"rows": [row for row in source["rows"] if wanted(row)]}


def of_suite(suite):
    """The committed rows of a suite."""
    return [row for row in RESULTS["rows"] if row["suite"] == suite]


def row_of(suite, **wanted):
    """The one committed row of a suite with these fields."""
    [row] = [row for row in of_suite(suite) if all(row[key] == x for key, x in wanted.items())]
    return row


def rate(suite, version, **wanted):
    """What the benchmark measured: TFLOP/s, or TB/s where memory is the limit."""
    return row_of(suite, version=version, **wanted)[UNITS.get(suite, "tflops")]


def ratio(suite, version, other, **wanted):
    """A rate over another one of the same shape."""
    return rate(suite, version, **wanted) / rate(suite, other, **wanted)
