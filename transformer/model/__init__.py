"""A decoder in Hugging Face's layout: its configuration, weights, caches and fused step."""
