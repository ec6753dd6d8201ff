"""The versions, one folder each, what they are made of, the oracle, and `attention` (`api.py`).

May import: `dispatch`. In here: tiles <- fp8, fa1, fa2 <- fa3 <- fa4 <- api; oracle imports fp8.
"""
