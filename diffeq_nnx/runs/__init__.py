"""Work directories: which run owns one, its checkpoints, and runs that are opened or made."""
