"""Calls that were seen before: their kernels are launched without the Python that chose them.

On a GPU, the host's time for a call of `attention` is the time of its Python, and with small
tensors the GPU waits for it. Which memory a call takes, which kernels it launches and with which
numbers follows from its options and from what its tensors are like, not from their values. So a
call like one before is recorded as a `Tape`, and later ones replay the tape at the addresses of
their own tensors, and with numbers that follow from their own lengths (`traced.py`).

This is what a CUDA graph does, on the host: addresses and lengths may change from call to call,
memory comes from torch's allocator, and a call that cannot be recorded goes its ordinary way.
"""
