"""The pictures of the walkthroughs, all of them matplotlib code; each function returns a Figure.
`films` shows one for each step of a kernel.

from lessons.pictures.memory import rooflines, traffic
from lessons.pictures.scores import softmax_state, splits, tiles
from lessons.pictures.pipeline import gantt, roles
"""
