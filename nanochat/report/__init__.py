"""A run's files become one page."""
