"""Recordings of running kernels for the stepper, the page docs/extra/stepper/index.html.

`source` is the text that a reader sees, and finds the line of it that a kernel is at; `portable`
watches a Triton kernel in the interpreter, `hopper` a Gluon kernel in the emulator.
"""
