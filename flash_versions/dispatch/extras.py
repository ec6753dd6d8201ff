"""Optional packages: which are missing, and the command that installs them."""

from importlib.util import find_spec


def missing(extra: str, *packages: str) -> str:
    """One sentence that names the packages of an extra that are not installed; "" if all are."""
    names = [package for package in packages if find_spec(package) is None]
    if not names:
        return ""
    return (
        f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} not installed; "
        f"pip install 'flash-versions[{extra}]' does that."
    )
