"""Text and records beyond the core: downloads from hubs, other formats of files, records of tasks, a cache of tokens."""
