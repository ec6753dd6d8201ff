"""`python -m flash_versions.bench`: see `run.py`."""

import signal
import sys

from flash_versions.bench.run import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that it ends its worker
    sys.exit(main())
