"""What is right: the specification in any float dtype, and the error budget.

May import: `dispatch`, `fp8`, `tiles`.
"""
