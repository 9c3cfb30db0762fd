"""Adapters: fine-tuning through small matrices, over a base of 16 or 4 bits."""
