"""The package's kernels as a notebook shows them: their source, what the compiler made of them, and
what they do while they run.
"""
