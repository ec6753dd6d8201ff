"""Supervised training on data of one's own: chats and texts, packed, on any checkpoint."""
