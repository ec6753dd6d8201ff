"""The errors of FP8 attention against fp64 attention of the unquantised inputs; writes JSON.

    python -m tests.benchmarks.attention.fp8_accuracy --out docs/results/fp8/h200-accuracy.json

`flash_versions/bench/accuracy.py` says what is measured. `--device cpu` simulates a small shape.
"""

from flash_versions.bench.accuracy import ORACLE_ROWS, measure
from flash_versions.bench.document import new_document
from tests.benchmarks.harness import keep, parser

VERSION = "fa3"  # whose FP8 kernel runs
# Tokens, heads, and those of them that the oracle computes; simulated, they take a minute.
SIZES = {"cuda": (8192, 16, 4), "cpu": (512, 2, 2)}


def main():
    """Measure; the file is written again after each row."""
    options = parser(__doc__).parse_args()
    length, heads, judged = SIZES[options.device]
    oracle = f"fp64, {min(ORACLE_ROWS, length)} queries of {judged} heads, all keys"
    what = {"version": VERSION, "S": length, "H": heads, "oracle": oracle}
    document = new_document(options.device, what=what)
    for row in measure(VERSION, SIZES[options.device], options.device):
        keep(document, options.out, [{"suite": "accuracy", **row}])


if __name__ == "__main__":
    main()
