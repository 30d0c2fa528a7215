"""Calls that are still going on: their frames. After an error or Ctrl-C no hook tells of the end, but the frame is gone."""

from types import FrameType

__all__ = ["is_around"]


def is_around(outer: FrameType | None, frame: FrameType | None) -> bool:
    """True where the call `outer` is still going on, as seen from `frame`: it has called that, directly or not."""
    if outer is None:
        return False
    while frame is not None and frame is not outer:
        frame = frame.f_back
    return frame is not None
