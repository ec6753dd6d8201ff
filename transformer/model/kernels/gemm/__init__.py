"""Matrix products with what follows them, portable and for Hopper.

May import: `flash_versions`, below its public API, too.
"""
