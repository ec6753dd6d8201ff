"""`python -m docs.report`: write the tables of docs/results into the documents, and draw the
figures of the transformer.

Every table of measurements in README.md and docs/ stands between two markers that name it:

    <!-- results: prefill -->  ...  <!-- end -->

The columns are the versions and peers that the JSON has.
"""

import argparse
import re
import sys

from docs.report import attention, transformer, versions
from docs.report.figures import FIGURES
from flash_versions.bench.results import RESULTS, ROOT, Document, read_results
from flash_versions.files import write
from flash_versions.plot.figures import draw_all

BLOCK = re.compile(r"(<!-- results: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
DOCUMENTS = [
    path
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("[a-z]*/*.md")))
    if path.exists() and BLOCK.search(path.read_text())
]
TABLES = attention.TABLES | transformer.TABLES | versions.TABLES


def filled(text: str, document: Document) -> str:
    """The text with the content of every marked block rewritten from the results."""
    return BLOCK.sub(lambda m: m[1] + TABLES[m[2]](document) + m[3], text)


def main() -> int:
    """Rewrite the marked blocks of all documents; returns the exit code."""
    document = read_results()
    for path in DOCUMENTS:
        text = path.read_text()
        if (new := filled(text, document)) != text:
            write(path, new)
        sys.stderr.write(f"{path.relative_to(ROOT)}: up to date with docs/{RESULTS.name}\n")
    draw_all(FIGURES)
    return 0


if __name__ == "__main__":
    argparse.ArgumentParser(
        prog="python -m docs.report",
        description="write the tables of docs/results into the documents",
    ).parse_args()
    sys.exit(main())
