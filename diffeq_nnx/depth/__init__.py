"""Depth as a choice: generated weights to stored ones and back, sizes of steps, the numbers that a run trained."""
