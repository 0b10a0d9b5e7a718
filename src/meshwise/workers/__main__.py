"""Run what a launcher starts: a worker, or a fork server.

python -m meshwise.workers TASK                       a worker
python -m meshwise.workers --fork-server FD MODULE... a server that forks workers; see fork_server.py
"""

import gc
import importlib
import signal
import socket
import sys
from collections.abc import Sequence

from meshwise.workers import fast_exit, fork_server, worker  # fast_exit first: its exit function must run last


def _serve(descriptor: int, modules: Sequence[str]) -> int:
    interrupted = signal.signal(signal.SIGINT, signal.SIG_IGN)  # ignore Ctrl-C even during the imports
    worker.die_with_parent()
    gc.disable()  # no collections, since imports create little garbage
    for module in modules:
        importlib.import_module(module)
    gc.enable()
    return fork_server.serve(socket.socket(fileno=descriptor), worker.main_of_fork, interrupted)


if __name__ == "__main__":
    fast_exit.exit_now(_serve(int(sys.argv[2]), sys.argv[3:]) if sys.argv[1] == "--fork-server" else worker.main())
