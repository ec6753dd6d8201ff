"""Questions with answers that can be checked.

May import: nothing else of this package.
"""
