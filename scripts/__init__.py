"""One flat file a command: `python -m scripts.NAME --help`."""
