"""Trials that go wrong, for the tests of `flash_versions.verify`."""

import json
import os
import sys
import time

for line in sys.stdin:
    version, number = json.loads(line)
    if number == 1 and version == "hangs":
        time.sleep(60)
    if number == 1 and version == "dies":
        sys.stderr.write("illegal memory access\n")
        sys.stderr.flush()
        os._exit(7)
    sys.stdout.write(json.dumps({"outcome": "passed"}) + "\n")
    sys.stdout.flush()
