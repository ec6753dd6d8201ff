"""The versions, one folder each, what they are made of, the oracle, and `attention` (`api.py`)."""
