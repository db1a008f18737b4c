"""Tests."""

import gc

# Tracing makes many objects that live on, and JAX does work of its own in each collection. Collecting more rarely took
# 5 to 8 % of the CPU time off tests/test_train_step.py and tests/test_generation.py (three interleaved pairs).
gc.set_threshold(50_000, 20, 100)
