"""Where the samples of RL come from: this process, servers, workers of a Ray cluster."""
