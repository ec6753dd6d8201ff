"""Supervised training: the data, the loop, evaluation; adapters and several processes, which GRPO
uses, too.

May import: `tasks`, `generation`, `model`.
"""
