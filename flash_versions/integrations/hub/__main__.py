"""`python -m flash_versions.integrations.hub FOLDER`: write the kernel for the Kernels Hub."""

import argparse
import sys
from pathlib import Path

from flash_versions.integrations.hub.export import VERSION, write_kernel


def main(arguments: list[str] | None = None) -> int:
    """Write it, and say how to use it; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m flash_versions.integrations.hub",
        description="write the repository of a kernel for Hugging Face's Kernels Hub",
    )
    parser.add_argument("folder", type=Path, help="where the repository is written")
    parser.add_argument("--name", default="flash-versions", help="of the kernel (flash-versions)")
    options = parser.parse_args(arguments)
    try:
        write_kernel(options.folder, options.name)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    sys.stdout.write(
        f"{options.folder} is written. To upload it:\n"
        f"  hf upload OWNER/{options.name} {options.folder} . --repo-type kernel"
        f" --revision v{VERSION}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
