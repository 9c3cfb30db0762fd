"""The parts that differ between kinds of devices: their runtimes (nanochat/device.py), the model's operators
(nanochat/operators.py), recorded launches, the compiler and the profiler."""

PLUGS = {
    "kernels": {
        "npu": "nanochat.kernels.accelerators:NpuRuntime",
        "cuda": "nanochat.kernels.accelerators:CudaRuntime",
        "cpu": "nanochat.kernels.cpu:CpuRuntime",
    },
}
