"""The door of every notebook: `from hooklab import lesson`; `python -m hooklab.lesson` checks this machine."""

from hooklab.course.environment import OLDEST_TORCH, STORED_TORCH, cached_weights, check_environment, data, main
from hooklab.course.glyphs import glyphs
from hooklab.course.lesson import start
from hooklab.course.transformer import TinyTransformer, recall, trained_transformer

__all__ = [
    "OLDEST_TORCH",
    "STORED_TORCH",
    "TinyTransformer",
    "cached_weights",
    "check_environment",
    "data",
    "glyphs",
    "recall",
    "start",
    "trained_transformer",
]

if __name__ == "__main__":
    main()
