"""What all emulations share: a small GPU, and orders in which partitions may run."""

import pytest

from flash_versions.dispatch.device import Properties, devices
from flash_versions.dispatch.emulator import machine
from flash_versions.dispatch.emulator.machine import ORDERS


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    """So that programs walk over several tiles."""
    monkeypatch.setattr(devices, "assumed", Properties(num_sms=2))


@pytest.fixture
def order(request, monkeypatch):
    """Run a test in an order, named by its parameter."""
    monkeypatch.setattr(machine, "order", ORDERS[request.param])
