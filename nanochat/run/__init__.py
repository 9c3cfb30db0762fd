"""What surrounds a training loop; imported by scripts only."""
