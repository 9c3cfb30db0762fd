"""Samplers of RL outside of the trainer's engine: servers, workers of a Ray cluster, samples drawn ahead."""

PLUGS = {
    "samplers": {
        "http": "nanochat.samplers.http:HttpSampler",
        "https": "nanochat.samplers.http:HttpSampler",
        "ray": "nanochat.samplers.ray:RaySampler",
    },
}
