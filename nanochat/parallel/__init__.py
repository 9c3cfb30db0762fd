"""One model over many processes: the ranks' mesh, sharded parameters, and the collectives that other files call."""

PLUGS = {
    "layouts": {
        "ddp": "nanochat.parallel.ddp:lay_out",
        "fsdp": "nanochat.parallel.fsdp:lay_out",
        "context": "nanochat.parallel.context:share_rows",
        "experts": "nanochat.parallel.experts:lay_out",
    },
}
