"""Functions of simulated kernels that tell a test of their calls."""

from flash_versions.simulator.rebind import Watcher, rebound


def told(function, tell):
    """What takes the place of a kernel's function in its module: tell(*arguments), then it."""
    compute = rebound(function)

    def call(*arguments, **named):
        tell(*arguments)
        return compute(*arguments, **named)

    return Watcher(function, call)
