"""What a folder carries that other programs read."""
