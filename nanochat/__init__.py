"""nanochat: raw text to a chat model, on Ascend NPUs, NVIDIA GPUs and plain CPUs."""

import os

# torch's threads on a CPU wait for each other in a loop (libgomp, which reads this when torch is loaded). A step of the
# demo took 453 ms on two cores, and 4,273 ms beside another busy program. With fewer turns of the loop before a thread
# sleeps it takes 414 and 1,010 ms (2026-11-28). On an AMD EPYC the step beside a program falls only from 2,382 to 2,051
# ms, and decoding with two threads gets slower (docs/measurements.md).
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"}:
    os.environ["GOMP_SPINCOUNT"] = "10000"

# In fp32, MKL's products depend on where a matrix begins in memory, and so a row's bits on the thread that computes it:
# with two threads a reply in a batch differed from the reply to a single prompt. With a fixed order of sums a training
# step takes 886 to 897 ms, without 910 to 953 (AMD EPYC, 2026-11-29).
os.environ.setdefault("MKL_CBWR", "AUTO")
