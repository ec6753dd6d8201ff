"""FA3 in Gluon for Hopper: the schedule written out by hand."""
