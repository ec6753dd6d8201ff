"""A function of tensors that is recorded, and then replayed."""

import logging
from collections.abc import Callable, Sequence

import torch

from flash_versions.dispatch.replay.keys import are_apart
from flash_versions.dispatch.replay.recording import Recording, alone
from flash_versions.dispatch.replay.script import Replay, Returned, written


class Tape:
    """A function of tensors that takes memory and launches kernels. Its second call is recorded,
    because most shapes come once only and recording takes time; later ones replay the recording.

    Which memory and which kernels must not depend on what is in the tensors, nor on anything else
    that differs from call to call: all tensors have one type, shape and stride, and the stream is
    one, too. Of these a tape notices only tensors that are not aligned to 16 bytes. Every launch
    must call `recording.note`: a kernel launched without it is missing from the replay, and nothing
    reports that.

    A tape keeps no tensor of the call that it recorded, nor the function: that is given at each
    call, because it may belong to what keeps the tape.
    """

    def __init__(self) -> None:
        self.called = False
        self.replay: Replay | None = None
        self.reason: str | None = None  # why it cannot be replayed

    def __call__(
        self,
        function: Callable[..., Returned],
        tensors: Sequence[torch.Tensor | None],
        stream: int | None,
    ) -> Returned:
        """What the function returns for the tensors. With a stream of None, it is called."""
        if self.replay is not None and stream is not None:
            results = self.replay(tensors)
            return function(*tensors) if results is None else results
        if stream is None or self.reason is not None or not self.called:
            self.called = True
            return function(*tensors)
        if not are_apart(tensors):
            return function(*tensors)
        if not alone.acquire(blocking=False):  # another thread records: the next call can be it
            return function(*tensors)
        try:
            with Recording() as recording:
                results = function(*tensors)
        finally:
            alone.release()
        try:
            self.replay = written(recording, tensors, results, stream)
        except Exception as error:  # such as a name that a later Triton changed: the results are
            self.reason = str(error) or repr(error)  # there, and must not be lost for it
            logging.getLogger(__name__).debug("a call is not replayed: %s", self.reason)
        return results
