"""x"""
from flash_versions.diff.plain import changed, plain_diff, plain_source
