"""What preferences and RL add to the core: what a reply is worth, and against what it is compared."""
