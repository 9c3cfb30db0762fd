"""The built-in corpus: its grammar, its stories and their checker."""

# The plugs of this room for the core (nanochat/rooms.py): seam -> name -> place.
PLUGS = {
    "corpora": {
        "demo": "nanochat.demo.corpus:DemoCorpus",
    },
}
