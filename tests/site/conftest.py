"""The site, built once for all its tests, as if the repository were example/hooklab; and a server for the browser."""

import functools
import os
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "site"))


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    """The folder with the pages."""
    pytest.importorskip("sphinx", reason="`make test-long` installs what the site needs")
    build = tmp_path_factory.mktemp("site")
    settings = {
        "SITE_BUILD": str(build),
        "GITHUB_REPOSITORY": "example/hooklab",
        "SITE_URL": "https://example.org/hooklab/",
    }
    command = [sys.executable, str(ROOT / "docs" / "site" / "build.py")]
    built = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    return build / "html"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="session")
def address(site):
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=site))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    server.server_close()
