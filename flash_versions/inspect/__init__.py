"""What the compiler makes of a call, for any architecture and without a GPU.

May import: `versions`, `dispatch`.
"""
