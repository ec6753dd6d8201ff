"""Puzzles: kernels to write, from a masked copy to a small FlashAttention 3, checked as you go."""

from flash_versions.dispatch.interpreter import triton_missing

if sentence := triton_missing():
    # With this name, `python -m` ends with the sentence and without a traceback.
    raise ImportError(sentence, name=__name__)
