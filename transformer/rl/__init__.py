"""Reinforcement learning: rollouts, the GRPO loss, a step, and a run on disk."""
