"""Checks for the exercises and predictions of the notebooks: `from hooklab import check`."""

from hooklab.exercises import check

__all__ = ["check"]
