"""The operators of the model on each kind of device: one interface, nanochat/operators.py."""

# What plugs into the core (nanochat/rooms.py): seam -> name -> place. The names are device.py's.
PLUGS = {
    "kernels": {
        "npu": "nanochat.kernels.npu:NpuKernels",
        "npu without fused operators": "nanochat.kernels.npu:PlainNpuKernels",
        "cuda": "nanochat.kernels.cuda:CudaKernels",
        "cuda without varlen_attn": "nanochat.kernels.gradients:WrittenKernels",
        "cpu": "nanochat.kernels.cpu:CpuKernels",
        "fp8": "nanochat.kernels.fp8:use_fp8",
    },
}
