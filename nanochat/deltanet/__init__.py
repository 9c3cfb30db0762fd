"""Layers that keep a state of fixed size instead of keys and values: those of Qwen3.5 and its successors."""
