"""A small transformer around the attention kernels: load, generate, chat, train."""

import os
import signal
import sys

if sys.argv[:1] == ["-m"]:  # Python imports this package to run one of its commands
    # Threads that wait for each other sleep. By default they spin: on a busy machine two threads
    # then take ten times as long as one. OpenMP reads this when torch is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Ctrl-C during the imports ends the process without a traceback; a command then calls
    # `interruptible`.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


from flash_versions.dispatch.extras import missing  # noqa: E402

if sentence := missing("transformer", "jinja2", "safetensors", "tokenizers", "tqdm"):
    # With this name, `python -m` ends with the sentence and without a traceback.
    raise ImportError(sentence, name=__name__)
