"""The server: a scheduler that batches, an API people know, a page."""
