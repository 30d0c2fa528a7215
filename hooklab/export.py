"""The door for nbconvert: `--SlidesExporter.preprocessors=hooklab.export.Both` (or `Chinese`, `English`)."""

from hooklab.course.export import Both, Chinese, English

__all__ = ["Both", "Chinese", "English"]
