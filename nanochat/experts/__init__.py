"""Mixture of experts: several MLPs in each block, of which a router chooses a few for each token."""

# The plugs of this room for the core (nanochat/rooms.py): seam -> name -> place.
PLUGS = {
    "attendants": {"experts": "nanochat.experts.loads:Loads"},
}
