"""Models for other libraries: Hugging Face folders, StableHLO; and Hugging Face folders as models."""
