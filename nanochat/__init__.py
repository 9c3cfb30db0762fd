"""nanochat: raw text to a chat model, on Ascend NPUs, NVIDIA GPUs and plain CPUs."""
