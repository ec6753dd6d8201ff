"""One sequence over several GPUs: ring attention, all-to-all, and two partial results in one.

May import: `dispatch`, `versions.api`; never a single version.
"""
