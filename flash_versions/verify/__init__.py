"""Verify every kernel on a GPU, above all on one that its authors never had."""

from flash_versions.dispatch.extras import triton_missing

if sentence := triton_missing():
    # With this name, `python -m` ends with the sentence and without a traceback.
    raise ImportError(sentence, name=__name__)
