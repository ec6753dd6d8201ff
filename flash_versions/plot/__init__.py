"""Figures of committed results.

May import: `bench.results` and what that imports, `dispatch.extras`; numpy, matplotlib.
"""

from flash_versions.dispatch.extras import missing

if sentence := missing("plot", "matplotlib"):
    # With this name, `python -m` ends with the sentence and without a traceback.
    raise ImportError(sentence, name=__name__)
