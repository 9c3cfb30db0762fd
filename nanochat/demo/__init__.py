"""The built-in corpus: its grammar, its stories and their checker."""
