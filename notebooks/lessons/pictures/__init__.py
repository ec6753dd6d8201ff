"""The pictures of the walkthroughs, all of them matplotlib code; each function returns a Figure.

from lessons.pictures import tiles, softmax_state, splits, gantt, roles, traffic, rooflines
"""
