"""The roles of a kernel's warps, and which of them works when."""
