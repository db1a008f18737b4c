"""Generating text."""
