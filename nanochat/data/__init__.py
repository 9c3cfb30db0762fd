"""Text and records beyond the core: downloads, other formats of files, records of tasks, a cache of tokens."""
