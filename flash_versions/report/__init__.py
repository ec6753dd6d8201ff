"""Write the tables of committed results into the documents.

May import: `bench.results` and what that imports.
"""
