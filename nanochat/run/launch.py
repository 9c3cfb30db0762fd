"""torchrun for one host, with a port that only this host can reach.

    python -m nanochat.run.launch --nproc_per_node=8 -m scripts.base_train -- --depth=12

It takes torchrun's flags, such as `--max_restarts=3`. It differs in the rendezvous, where the processes of a job learn
each other's addresses. torchrun's rendezvous listens on every network interface without a password, and with
`--standalone` it also unpickles the data it receives: any process that reaches the port can run any program. This one
listens on 127.0.0.1 at a free port and unpickles nothing. It also passes on more signals, and ends with the exit code
of the process that failed.
"""

import os
import signal
import sys
from datetime import timedelta

from nanochat.ground.cli import SIGNALS, end_with_launcher, fail

BACKEND = "loopback"
TIMEOUT_SECONDS = 600
SAVE_SECONDS = 660  # from a signal to the end of the ranks; the last save may take 600 of them (loop.py)


def main() -> None:
    """Run torchrun with this rendezvous instead of the one that its flags choose."""
    end_with_launcher()
    os.environ["_NANOCHAT_PARENT"] = str(os.getpid())
    # Here: they take seconds, in which signals should count already.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    from nanochat.ground import store

    class LoopbackRendezvous(StaticTCPRendezvous):
        """torchrun's rendezvous for known hosts, here for one host, over a store that listens on 127.0.0.1."""

        def __init__(self, parameters: RendezvousParameters):
            served = store.serve(timedelta(seconds=TIMEOUT_SECONDS))
            super().__init__(store.LOOPBACK, served.port, 0, 1, parameters.run_id, TIMEOUT_SECONDS)
            self._store = served  # the base class creates a store only if this is unset

        def get_backend(self) -> str:
            return BACKEND

    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    signals = ",".join(number.name for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN)
    arguments = run.parse_args([f"--signals_to_handle={signals}", f"--shutdown_timeout={SAVE_SECONDS}", *sys.argv[1:]])
    if arguments.nnodes not in ("1", "1:1"):
        fail(f"--nnodes {arguments.nnodes}: this is for one host, docs/multinode.md has several", code=2)
    arguments.standalone = False
    arguments.rdzv_backend = BACKEND
    arguments.rdzv_endpoint = store.LOOPBACK
    try:
        run.run(arguments)
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as failed:
        codes = [failure.exitcode for failure in failed.failures.values()]  # the first to end comes first
        # A rank that crashed is the cause of the others' errors.
        code = min(codes, key=lambda code: code >= 0 or -code in SIGNALS)
        sys.exit(code if code >= 0 else 128 - code)  # as a shell has it: 137 for -9, killed by signal 9


if __name__ == "__main__":
    main()
