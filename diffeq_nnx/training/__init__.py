"""Training: the step, the loop around it, validation and what it reports."""
