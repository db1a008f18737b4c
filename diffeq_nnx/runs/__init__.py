"""Run directories: which run owns one, its checkpoints, and opening it."""
