"""The committed results, and what the tests of tables and figures look up in them."""

from flash_versions.bench import results

RESULTS = results.read_results()


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
