"""What any program needs and no model is in; it imports nothing above it."""
