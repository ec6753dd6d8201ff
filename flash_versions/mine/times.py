"""`mine bench`: a file's version timed next to the package's, as `flash_versions.bench` does it."""

from collections.abc import Iterator

from flash_versions.bench.measure import ROUNDS, measure
from flash_versions.bench.suites import SUITES
from flash_versions.dispatch.version import VERSIONS, Version


def lines(version: Version) -> Iterator[str]:
    """A table for each shape of the quick suite, the fastest first.

    The version is added to those of this process, so it takes its turn with them, on the same
    inputs; it is timed only if its output is within its error budget.
    """
    VERSIONS[version.name] = version
    for shape in SUITES["quick"]:
        yield f"{shape}, {shape.dtype}"
        rows = measure("quick", shape, ROUNDS)
        times = {row["version"]: row["ms_p50"] for row in rows if "ms_p50" in row}
        for row in rows:
            if "reason" in row:
                yield f"  {row['version']:<12} not timed: {row['reason']}"
        for name, ms in sorted(times.items(), key=lambda pair: pair[1]):
            line = f"  {name:<12} {ms:8.3f} ms  {shape.flops() / ms / 1e9:6.1f} TFLOP/s"
            own = times.get(version.name)
            yield line if own is None else f"{line}  {own / ms:5.2f} x as fast as {version.name}"
