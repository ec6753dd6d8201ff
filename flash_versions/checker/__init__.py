"""Is a learner's kernel right, and if not, why? For puzzles and for `mine`.

A function that launches kernels is called in the simulator, which watches what they load and store,
and compiled (`observe`). Its results are held against an oracle, and what is wrong is described
(`case`). Lines of a right file are tried in the place of the learner's (`repairs`).
"""
