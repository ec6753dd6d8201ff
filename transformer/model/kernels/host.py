"""What a model asks of the machine and of the versions of attention, below their public API."""

from flash_versions.dispatch.device import devices
from flash_versions.dispatch.request import make_request
from flash_versions.simulator import say as say_simulated
from flash_versions.versions.api import choose_version

__all__ = ["choose_version", "devices", "make_request", "say_simulated"]
