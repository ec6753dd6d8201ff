"""Is a learner's kernel right, and if not, why? For puzzles and for `mine`.

A function that launches kernels is called in the simulator, which watches what they load and store
(`observe`). A result that is wrong is held against what common mistakes give (`mutants`), and what
Triton's compiler says of the kernel is its last word (`compiler`).
"""
