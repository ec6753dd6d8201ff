"""The attention as a kernel of Hugging Face's Kernels Hub, a folder that imports nothing of ours.

May import: `dispatch`, `flash_attn`, `versions.api`, `versions.masks`; never a single version.
"""
