"""A training service: the tinker client trains and samples here."""
