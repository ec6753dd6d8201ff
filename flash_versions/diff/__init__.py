"""What changes from one version to the next: diffs of kernels, kernels as a plain call sees them.
A laboratory that reads the sources of all other rooms: nothing of the package imports it, and it
imports the versions only to look at their source (every name that it knows is in `names.py`).
"""

from flash_versions.diff.files import lesson, version_names
from flash_versions.diff.plain import plain_functions, plain_source
from flash_versions.diff.views import as_html, changed, kernel_diff, kernel_source, plain_diff

__all__ = [
    "as_html",
    "changed",
    "kernel_diff",
    "kernel_source",
    "lesson",
    "plain_diff",
    "plain_functions",
    "plain_source",
    "version_names",
]
