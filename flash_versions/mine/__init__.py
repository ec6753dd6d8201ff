"""A version of yours in one file: write it, check it, rank it, time it."""

from flash_versions.dispatch.interpreter import triton_missing

if sentence := triton_missing():
    # With this name, `python -m` ends with the sentence and without a traceback.
    raise ImportError(sentence, name=__name__)
