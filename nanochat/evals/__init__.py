"""Measures of a model: graded replies to tasks, and CORE."""
