"""The puzzles' command: see `flash_versions.puzzles.command`."""

import sys

from flash_versions.puzzles.command import main

if __name__ == "__main__":
    sys.exit(main())
