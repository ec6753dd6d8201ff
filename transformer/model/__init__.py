"""A decoder in Hugging Face's layout: its configuration, weights, caches and fused step.

May import: `flash_versions`, and in here `kernels`.
"""
