"""FA3 in Gluon for Hopper: the schedule written out by hand.

May import: `fa3`, `tiles`, `dispatch`.
"""
