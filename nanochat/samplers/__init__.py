"""Where the samples of RL come from: this process, servers, workers of a Ray cluster."""

# What plugs into the core (nanochat/rooms.py): seam -> name -> place.
PLUGS = {
    "samplers": {
        "http": "nanochat.samplers.http:HttpSampler",
        "https": "nanochat.samplers.http:HttpSampler",
        "ray": "nanochat.samplers.ray:RaySampler",
    },
    "sampling": {
        "ahead": "nanochat.samplers.ahead:Ahead",
    },
}
