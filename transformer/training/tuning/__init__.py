"""Supervised training on data of one's own: chats and texts, packed, on any checkpoint.

May import: `tasks`, `generation`, `model`, and of `training` what is beside this room.
"""
