"""Files of exported folders for other programs."""
