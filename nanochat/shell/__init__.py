"""The ground floor: the command line, paths, the log, files on disk."""
