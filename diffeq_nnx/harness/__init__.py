"""Downstream evaluation with lm-evaluation-harness (lm_eval, the extra `harness`)."""
