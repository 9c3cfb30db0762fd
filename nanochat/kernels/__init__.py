"""What differs between kinds of devices: the model's operators behind one interface (nanochat/operators.py), the
compiler, the profiler."""

# What plugs into the core (nanochat/rooms.py): seam -> name -> place.
PLUGS = {
    # The operators of a kind of device: (dtype of the products, the chip's name) -> kernels.
    "kernels": {
        "npu": "nanochat.kernels.choice:for_npu",
        "cuda": "nanochat.kernels.choice:for_cuda",
        "cpu": "nanochat.kernels.choice:for_cpu",
    },
    # Other products for the blocks of a model, by flag: (device, model) -> what computes them now, for the log.
    "products": {"fp8": "nanochat.kernels.fp8:use_fp8"},
}
