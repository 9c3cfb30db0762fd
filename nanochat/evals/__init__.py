"""Measures of a model: bits per byte on held-out text."""
