"""What is around a training loop, from its flags to its end; only scripts and rooms import it."""

PLUGS = {
    "attendants": {
        "watchdog": "nanochat.run.watchdog:Watchdog",
        "profile": "nanochat.run.profiling:Recorder",
        "dry_run": "nanochat.run.memory:begin",
        "pretend": "nanochat.run.memory:pretend",
        "check_track": "nanochat.run.trackers:check_trackers",
        "track": "nanochat.run.trackers:start_trackers",
    },
}
