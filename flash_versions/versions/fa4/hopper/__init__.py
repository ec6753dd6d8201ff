"""FA4 in Gluon for Hopper: roles with states, and a record of when each was in which.

May import: `fa4`, `fa3`, `tiles`, `dispatch`.
"""
