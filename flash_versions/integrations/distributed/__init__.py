"""One sequence over several GPUs: ring attention, all-to-all, and two partial results in one."""
