"""One model over many processes: the ranks' mesh, sharded parameters, and the memory that each takes."""

PLUGS = {
    "layouts": {
        "ddp": "nanochat.parallel.ddp:lay_out",
        "fsdp": "nanochat.parallel.fsdp:lay_out",
        "context": "nanochat.parallel.context:share_rows",
        "experts": "nanochat.parallel.experts:lay_out",
        "dry_run": "nanochat.parallel.dry_run:begin",
        "dry_run_devices": "nanochat.parallel.dry_run:pretend",
    },
}
