"""The door for nbconvert, `--HTMLExporter.preprocessors=hooklab.export.English` (or `Chinese`), for the site and the slides."""

from hooklab.course.export import LANGUAGES, Chinese, English, OneLanguage

__all__ = ["LANGUAGES", "Chinese", "English", "OneLanguage"]
