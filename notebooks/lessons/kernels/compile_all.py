"""Run `python -m flash_versions.inspect` for many calls in one process, as importing torch takes
longer than compiling. Standard input: a JSON list of argument lists; standard output: a JSON list
of [exit code, output, errors].
"""

import io
import json
import sys
from contextlib import redirect_stderr, redirect_stdout

from flash_versions.inspect.command import main


def inspect(arguments: list[str]) -> tuple[int, str, str]:
    """One call: exit code, output, errors."""
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(arguments)
        except SystemExit as end:  # an option that does not exist
            code = int(end.code or 0)
    return code, out.getvalue(), errors.getvalue()


if __name__ == "__main__":
    json.dump([inspect(arguments) for arguments in json.load(sys.stdin)], sys.stdout)
