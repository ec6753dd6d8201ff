"""A call on its way to a kernel: its arguments in one form, the contract of a version, the launch.

May import: `dispatch.interpreter`; nothing else of this package.
"""
