"""Trials that go wrong, for the tests of `flash_versions.verify`."""

import json
import os
import sys
import time

if __name__ == "__main__":
    version, first, end = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for number in range(first, end):
        sys.stdout.write(json.dumps({"begins": number}) + "\n")
        sys.stdout.flush()
        if number == 1 and version == "hangs":
            time.sleep(60)
        if number == 1 and version == "dies":
            sys.stderr.write("illegal memory access\n")
            sys.stderr.flush()
            os._exit(7)
        sys.stdout.write(json.dumps({"number": number, "outcome": "passed"}) + "\n")
        sys.stdout.flush()
    sys.stdout.write(json.dumps({"done": True}) + "\n")
