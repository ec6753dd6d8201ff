"""What all these launches share: a small GPU, and orders in which partitions may run."""

import pytest

from flash_versions.dispatch.device import devices
from flash_versions.simulator.gluon.machine import ORDERS, using
from tests.simulator.gluon.hopper import gpu


@pytest.fixture(autouse=True)
def two_multiprocessors(monkeypatch):
    """Of a Hopper GPU, so that programs walk over several tiles."""
    monkeypatch.setattr(devices, "assumed", gpu(2))


@pytest.fixture
def order(request):
    """Run a test in an order, named by its parameter."""
    with using(order=ORDERS[request.param]):
        yield
