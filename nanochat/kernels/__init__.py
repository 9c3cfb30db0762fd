"""The parts that differ between kinds of devices: the model's operators, behind one interface
(nanochat/operators.py), the compiler and the profiler."""

PLUGS = {
    "kernels": {
        "npu": "nanochat.kernels.choice:for_npu",
        "cuda": "nanochat.kernels.choice:for_cuda",
        "cpu": "nanochat.kernels.choice:for_cpu",
    },
}
