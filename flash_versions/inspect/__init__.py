"""What the compiler makes of a call, for any architecture and without a GPU."""

from flash_versions.dispatch.extras import triton_missing

if sentence := triton_missing():
    # With this name, `python -m` ends with the sentence and without a traceback.
    raise ImportError(sentence, name=__name__)
