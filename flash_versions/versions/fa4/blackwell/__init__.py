"""FA4 in Gluon for Blackwell (sm_100): accumulators in tensor memory, a role for each unit."""
