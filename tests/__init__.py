"""Tests."""

import gc

# Tracing makes many objects that live on, and JAX does work of its own in each collection. Collecting more rarely takes
# 6 to 8 % off two files of tests.
gc.set_threshold(50_000, 20, 100)
