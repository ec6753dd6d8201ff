"""What tables of results are made of: their text, and where their figures are from."""

from collections.abc import Iterable

from flash_versions.bench.results import Document


def not_measured(suite: str) -> str:
    """What stands where a table would be; "backward peer" is one more run of "backward"."""
    suite = suite.removesuffix(" peer")
    return f'Not measured yet: `python -m flash_versions.bench --suite "{suite}"`.\n'


def markdown(header: list[str], body: list[list[str]]) -> str:
    """A table; the first column is text, the others are numbers."""
    lines = [header, ["---", *["--:"] * (len(header) - 1)], *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def provenance(document: Document, suite: str) -> str:
    """One sentence on where, when and how the numbers of a suite were measured."""
    protocol = document["suites"][suite]["protocol"]
    rows = [row for row in document["rows"] if row["suite"] == suite]
    precisions = " and ".join(dict.fromkeys(row.get("precision", "bf16") for row in rows))
    libraries = ("flash-attn-4", "cudnn-frontend") if "fp8" in precisions else ("flash-attn-4",)
    return (
        f"{where_and_when(document, suite, libraries)}; {precisions}, median of "
        f"{protocol['rounds']} rounds in which the competitors take turns, cold L2."
    )


def where_and_when(document: Document, suite: str, libraries: Iterable[str] = ()) -> str:
    """GPU, versions, date and commit of a suite; of other libraries those that were installed."""
    about = document["suites"][suite]
    machine = about["machine"]
    parts = [machine["gpu"]]
    for name in ("torch", "triton", "cudnn", *libraries):
        if (which := machine.get(name, "not installed")) != "not installed":
            parts.append(f"{'cuDNN' if name == 'cudnn' else name} {which}")
    return ", ".join([*parts, about["date"], f"commit {about['commit'][:7]}"])
