"""Models of other families: their settings, names and weights in and out, tokenizers and chat formats."""

# The plugs of this room for the core (nanochat/rooms.py): seam -> name -> place.
PLUGS = {
    "tokenizers": {
        "hugging_face": "nanochat.families.imported_tokenizer:read_tokenizer",
    },
    "folders": {
        "huggingface": "nanochat.families.hf:FORMAT",
    },
}
