"""The door for nbconvert: `--SlidesExporter.preprocessors=hooklab.export.Both` (or `Chinese`, `English`); and for the site."""

from hooklab.course.export import LANGUAGES, Both, Chinese, English, OneLanguage

__all__ = ["LANGUAGES", "Both", "Chinese", "English", "OneLanguage"]
