"""A limit on the time that a reward may take: one that never returns would stop a run for ever."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

from transformer.tasks.verifiers import RewardError


class _TooLongError(BaseException):
    """Not an `Exception`: a reward that catches these and returns 0 would hide it."""


@contextmanager
def at_most(seconds: float, name: str) -> Iterator[None]:
    """Stop a body that runs longer. This takes a signal, which only the main thread gets, and no
    Windows has; elsewhere a body that took too long is refused once it has ended.

    Raises:
        RewardError: it took longer; `name` is that of the reward.
    """
    places = []

    def ring(number: int, frame: FrameType | None) -> None:
        if frame is not None:
            places.append(f" and was at {frame.f_code.co_filename}, line {frame.f_lineno}")
        raise _TooLongError

    started = time.monotonic()
    try:
        main = threading.current_thread() is threading.main_thread()
        with _alarm(seconds, ring) if main and hasattr(signal, "setitimer") else nullcontext():
            yield
    except _TooLongError:
        pass
    if places or time.monotonic() - started > seconds:
        limit = f"{seconds:g} seconds (--reward-seconds)"
        raise RewardError(f"{name} took more than {limit}{''.join(places)}")


@contextmanager
def _alarm(seconds: float, ring: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, min(seconds, threading.TIMEOUT_MAX))
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
