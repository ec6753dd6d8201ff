"""What changes from one version to the next: diffs of kernels, as a plain call sees them."""

from flash_versions.diff.files import version_names
from flash_versions.diff.plain import plain_functions, plain_source
from flash_versions.diff.views import (
    as_html,
    changed,
    kernel_diff,
    kernel_source,
    lesson,
    plain_diff,
)

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
