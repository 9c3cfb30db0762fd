"""Layers that keep a state of fixed size instead of keys and values, as in Qwen3.5 and its successors."""
