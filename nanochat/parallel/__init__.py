"""One model over many processes: the ranks' mesh, sharded parameters, and the collectives that other files call."""
