"""The families of checkpoints: the table of them, and how their config.json is read and written."""
