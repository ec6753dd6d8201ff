"""Tables of committed results, written into the documents.

May import: `bench.results` and what that imports.
"""
