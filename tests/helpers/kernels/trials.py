"""A worker whose tasks go wrong, for the tests of `flash_versions.bench.workers`. It imports
nothing of the package, so it starts at once.
"""

import json
import os
import sys
import time

for line in sys.stdin:
    version, number = json.loads(line)
    if version == "starts slowly":
        time.sleep(1)
    if version == "prints":
        sys.stdout.write("{'a': 1}\ntuning")
    sys.stdout.write("\n" + json.dumps({"running": version}) + "\n")
    sys.stdout.flush()
    if number == 1 and version == "hangs":
        time.sleep(60)
    if number == 1 and version == "dies":
        sys.stderr.write("illegal memory access\n")
        sys.stderr.flush()
        os._exit(7)
    sys.stdout.write(json.dumps({"outcome": "passed"}) + "\n")
    sys.stdout.flush()
