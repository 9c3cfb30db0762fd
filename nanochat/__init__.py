"""nanochat: raw text to a chat model, on Ascend NPUs, NVIDIA GPUs and plain CPUs."""

import os
from typing import Any

__version__ = "0.1.0"

# torch's threads on a CPU wait for each other in a loop (libgomp reads this when torch is loaded). With fewer turns of
# the loop before a thread sleeps, a step of the demo took 414 instead of 453 ms on two cores, and 1,010 instead of
# 4,273 ms beside another busy program (2026-11-28). An AMD EPYC gains less (docs/measurements.md).
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"}:
    os.environ["GOMP_SPINCOUNT"] = "10000"

# In fp32, MKL's products depend on where a matrix begins in memory, and so a row's bits on the thread that computes it:
# with two threads a reply in a batch differed from the reply to a single prompt. A fixed order of sums costs no time.
os.environ.setdefault("MKL_CBWR", "AUTO")


def __getattr__(name: str) -> Any:
    """`Chat`, imported when it is first used: `import nanochat` does not import torch."""
    if name != "Chat":
        raise AttributeError(f"nanochat has no {name}: its modules are imported by name")
    from nanochat.chat import Chat

    return Chat
