"""Models of other families: their settings, names and weights in and out, tokenizers and chat formats."""

# The plugs of this room for the core (nanochat/rooms.py): seam -> name -> place.
PLUGS = {
    "folders": {
        "huggingface": "nanochat.families.hf:FORMAT",
    },
}
