"""The progress panel's questions to the server: what the course consists of, what is done, and begin again."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_data_dir
from jupyter_server.base.handlers import APIHandler
from jupyter_server.utils import url_path_join
from tornado.web import authenticated

# hooklab itself is not imported: it would load PyTorch into the server.
COURSE = Path(find_spec("hooklab").origin).parent / "course"  # type: ignore[union-attr, arg-type]


def _kept() -> Path:
    """Where `hooklab.course.progress` keeps it."""
    return Path(jupyter_data_dir(), "hooklab", "progress.json")


class Progress(APIHandler):
    """GET: {"parts": …, "done": {id: step}}. DELETE: nothing is done any more."""

    @authenticated
    def get(self) -> None:
        """The outline of the course and what is done."""
        try:
            done = json.loads(_kept().read_text(encoding="utf-8"))
        except (OSError, ValueError):
            done = {}
        outline = json.loads((COURSE / "outline.json").read_text(encoding="utf-8"))
        self.finish(outline | {"done": done})

    @authenticated
    def delete(self) -> None:
        """Begin again."""
        _kept().unlink(missing_ok=True)
        self.set_status(204)
        self.finish()


def _load_jupyter_server_extension(server: Any) -> None:
    address = url_path_join(server.web_app.settings["base_url"], "hooklab", "progress")
    server.web_app.add_handlers(".*$", [(address, Progress)])
