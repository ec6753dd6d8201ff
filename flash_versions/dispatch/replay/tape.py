"""A function of tensors that is recorded, and then replayed."""

import logging
from collections.abc import Callable, Sequence

import torch

from flash_versions.dispatch.replay.keys import are_apart
from flash_versions.dispatch.replay.recording import Recording
from flash_versions.dispatch.replay.script import Replay, Returned, written

MOST_WAYS = 64


class Tape:
    """A function of tensors that takes memory and launches kernels. It is recorded and replayed for
    tensors of any lengths: a recording notes what the function computes from them.

    Where lengths decide, such as about a configuration, there is more than one way to go, and a
    recording of each, up to MOST_WAYS. Which memory and which kernels must not depend on what is in
    the tensors, nor on anything else that differs from call to call: all tensors are alike
    (`keys.alike`), and the stream is one. Of these a tape notices only tensors that are not aligned
    to 16 bytes. Every launch must call `recording.note`: a kernel launched without it is missing
    from the replay, and nothing reports that.

    A tape keeps no tensor of the call that it recorded, nor the function: that is given at each
    call, because it may belong to what keeps the tape.

    Attributes:
        replays: of the recordings, the last one that served first.
        reason: why there is no further recording.
    """

    def __init__(self) -> None:
        self.called = False
        self.replays: tuple[Replay, ...] = ()
        self.reason: str | None = None

    def __call__(
        self,
        function: Callable[..., Returned],
        tensors: Sequence[torch.Tensor | None],
        stream: int | None,
    ) -> Returned:
        """What the function returns for the tensors. With a stream of None, it is called."""
        for replay in self.replays if stream is not None else ():
            if (results := replay(tensors)) is not None:
                if replay is not self.replays[0]:
                    others = [x for x in self.replays if x is not replay]
                    self.replays = (replay, *others)
                return results
        first, self.called = not self.called, True
        if stream is None or first or self.reason is not None or not are_apart(tensors):
            return function(*tensors)
        if len(self.replays) >= MOST_WAYS:
            self.reason = "there are too many ways."
            return function(*tensors)
        results = None
        try:
            with Recording(tensors) as recording:
                results = function(*tensors)
            self.replays = (written(recording, tensors, results, stream), *self.replays)
        except Exception as error:  # such as a name that a later Triton changed: no result is lost
            if results is None:
                results = function(*tensors)  # which raises again what is wrong with the tensors
            self.reason = str(error) or repr(error)
            logging.getLogger(__name__).debug("a call is not replayed: %s", self.reason)
        return results
