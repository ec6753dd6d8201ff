"""What kernels are made of: tiles of rows, masks, the step of the softmax, copies and schedulers.

May import: `dispatch`.
"""
