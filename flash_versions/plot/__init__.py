"""Figures of committed results."""

from flash_versions.dispatch.extras import missing

if sentence := missing("plot", "matplotlib"):
    # With this name, `python -m` ends with the sentence and without a traceback.
    raise ImportError(sentence, name=__name__)
