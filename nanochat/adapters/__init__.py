"""Adapters: fine-tuning through small matrices, over a base of 16 or 4 bits."""

PLUGS = {
    "folders": {
        "peft": "nanochat.adapters.peft:FORMAT",
    },
    "adapters": {
        "new": "nanochat.adapters.lora:NewAdapters.from_flags",
        "find_base": "nanochat.adapters.folders:find_base",
        "weights": "nanochat.adapters.folders:with_saved_adapters",
        "base": "nanochat.adapters.folders:base_of",
    },
}
