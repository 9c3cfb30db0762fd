"""Models of other families: their settings, names and weights in and out, tokenizers and chat formats."""

PLUGS = {
    "folders": {
        "huggingface": "nanochat.families.hf:FORMAT",
    },
}
