"""Recordings of running kernels for the stepper, the page docs/extra/stepper/index.html.

`source` is the text that a reader sees, and finds the line of it that a kernel is at; `portable`
watches a simulated kernel of Triton, `hopper` one of Gluon.
"""
