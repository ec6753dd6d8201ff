"""`python -m flash_versions.diff fa1 fa2`: what changes from one version to the next."""

import argparse
import sys
from pathlib import Path

from flash_versions.diff import files, views

COLOURS = {"+": "\033[32m", "-": "\033[31m", "@": "\033[36m"}
EPILOG = """
  python -m flash_versions.diff fa1 fa2 --plain            the idea alone
  python -m flash_versions.diff fa1 fa2                    the kernels, with every option
  python -m flash_versions.diff fa1 fa2 --all              all files, the host's code included
  python -m flash_versions.diff fa3-hopper fa4-hopper      the kernels for Hopper
  python -m flash_versions.diff --show fa2 --plain         one kernel, whole
"""


def parser() -> argparse.ArgumentParser:
    """The command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m flash_versions.diff",
        description="what changes in the kernels from one version to the next",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known = ", ".join(files.shown_names())
    made.add_argument("versions", nargs="*", metavar="VERSION", help=f"two of {known}")
    made.add_argument("--show", metavar="VERSION", help="one version's kernels in place of a diff")
    made.add_argument("--backward", action="store_true", help="the kernels of the backward")
    made.add_argument("--all", action="store_true", help="all files of the versions")
    made.add_argument(
        "--plain", action="store_true", help="only what is left for a plain call: no options"
    )
    made.add_argument("--full", action="store_true", help="the plain call is not causal")
    made.add_argument("--head-dim", type=int, default=128, help="of the plain call (128)")
    made.add_argument("--context", type=int, default=3, help="unchanged lines around a change")
    made.add_argument("--html", type=Path, metavar="FILE", help="write a page instead of printing")
    return made


def check(options: argparse.Namespace) -> None:
    """Refuse what does not go together.

    Raises:
        ValueError: says what was given and what would work.
    """
    given = " ".join(options.versions) or "nothing"
    if options.show and options.versions:
        raise ValueError(f"--show {options.show} shows one version; {given} was given besides.")
    if not options.show and len(options.versions) != 2:
        raise ValueError(f"a diff takes two versions; {given} was given. Or use --show VERSION.")
    if options.all and (options.plain or options.show or options.backward):
        raise ValueError("--all shows all files of two versions; it takes no other view.")


def main(arguments: list[str] | None = None) -> int:
    """Print a diff or kernels, or write them as HTML; returns the exit code."""
    options = parser().parse_args(arguments)
    call = (options.plain, not options.full, options.head_dim, options.backward)
    try:
        check(options)
        if options.show:
            text = views.kernel_source(options.show, *call)
            lines, page = text.splitlines(), views.source_as_html(options.show, text)
        else:
            old, new = options.versions
            if options.all:
                lines = views.lesson(old, new, options.context)
            else:
                lines = views.kernel_diff(old, new, *call, options.context)
            page = views.as_html(old, new, lines)
        if options.html:
            options.html.write_text(page)
            return 0
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    for line in lines:
        is_coloured = sys.stdout.isatty() and not options.show
        colour = COLOURS.get(line[:1], "") if is_coloured else ""
        sys.stdout.write(f"{colour}{line}{colour and chr(27) + '[0m'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
