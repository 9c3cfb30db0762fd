"""The built-in corpus: its grammar, its stories and their checker."""

# What plugs into the core (nanochat/rooms.py): seam -> name -> place.
PLUGS = {
    "corpora": {
        "demo": "nanochat.demo.corpus:DemoCorpus",
    },
}
