"""`python -m meshwise.workers TASK` is a worker process; the launcher starts it."""

import sys

from meshwise.workers.worker import main

if __name__ == "__main__":
    sys.exit(main())
