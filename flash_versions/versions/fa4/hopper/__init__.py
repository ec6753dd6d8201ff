"""FA4 in Gluon for Hopper: roles with states, and a record of when each was in which."""
