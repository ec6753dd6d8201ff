"""Supervised training: the data, the loop, evaluation; adapters and several processes, which GRPO
uses, too. `tuning` trains on data of one's own.
"""
