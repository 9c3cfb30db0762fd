"""What is around a training loop, from its flags to its end; only scripts and rooms import it."""
