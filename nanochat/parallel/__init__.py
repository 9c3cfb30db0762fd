"""One model over many processes."""
