"""torchrun for one host, with a port that only this host can reach.

    python -m nanochat.run.launch --nproc_per_node=8 -m scripts.base_train -- --depth=12

It takes torchrun's flags, such as `--max_restarts=3`. It differs in the rendezvous, where the processes of a job learn
each other's addresses. torchrun's rendezvous listens on every network interface without a password, and with
`--standalone` it also unpickles the data it receives: any process that reaches the port can run any program. This one
listens on 127.0.0.1 at a free port and unpickles nothing.
"""

import signal
import sys
from datetime import timedelta

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import RendezvousParameters, rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

from nanochat.ground import store
from nanochat.ground.cli import end_with_launcher, fail

BACKEND = "loopback"
TIMEOUT_SECONDS = 600


class LoopbackRendezvous(StaticTCPRendezvous):
    """torchrun's rendezvous for known hosts, here for one host, over a store that listens on 127.0.0.1."""

    def __init__(self, parameters: RendezvousParameters):
        served = store.serve(timedelta(seconds=TIMEOUT_SECONDS))
        super().__init__(store.LOOPBACK, served.port, 0, 1, parameters.run_id, TIMEOUT_SECONDS)
        self._store = served  # the base class creates a store only if this is unset

    def get_backend(self) -> str:
        return BACKEND


@record  # adds a failed worker's report to torchrun's
def main() -> None:
    """Run torchrun with this rendezvous instead of the one that its flags choose."""
    end_with_launcher()
    rendezvous_handler_registry.register(BACKEND, LoopbackRendezvous)
    arguments = run.parse_args(sys.argv[1:])
    if arguments.nnodes not in ("1", "1:1"):
        fail(
            f"--nnodes {arguments.nnodes}: this starts the processes of one host; docs/multinode.md has several", code=2
        )
    arguments.standalone = False
    arguments.rdzv_backend = BACKEND
    arguments.rdzv_endpoint = store.LOOPBACK
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # started by nohup; torchrun would leave all the same
        arguments.signals_to_handle = "SIGTERM,SIGINT,SIGQUIT"
    run.run(arguments)


if __name__ == "__main__":
    main()
