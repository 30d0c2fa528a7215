"""What JupyterLab asks the server: what the course consists of, what is done, begin again; and what a handout explains."""

import json
import tomllib
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


class Explanations(APIHandler):
    """GET: {prediction: {"zh": …, "en": …}} of the notebook with this number."""

    @authenticated
    def get(self, number: str) -> None:
        """What is said after each guess, right or wrong."""
        found = {}
        for path in (COURSE / "checks").glob(f"n{number}_*.toml"):
            for name, words in tomllib.loads(path.read_text(encoding="utf-8")).items():
                if "zh" in words:  # an exercise has words for each answer
                    found[name] = {"zh": words["zh"], "en": words["en"]}
        self.finish(found)


def _load_jupyter_server_extension(server: Any) -> None:
    base = url_path_join(server.web_app.settings["base_url"], "hooklab")
    handlers = [(f"{base}/progress", Progress), (rf"{base}/explanations/(\d\d)", Explanations)]
    server.web_app.add_handlers(".*$", handlers)
