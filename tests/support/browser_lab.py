"""JupyterLab in a real browser, for tests/browser/: start a server, open a notebook, run it, look at it."""

import base64
import html
import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import forked_kernels
import pytest
from playwright.sync_api import Error, expect, sync_playwright

SCREENSHOTS = Path(__file__).parents[1] / "screenshots"
PAGE = {"width": 1100, "height": 1000}  # of the picture in the README
VIEWPORT = {"width": 1100, "height": 2000}  # pixels; a slice of a screenshot is a little less high
LABELS = {"both": "双语 Both", "zh": "中文", "en": "English"}  # in the order in which the button goes round
DEADLINE = 120  # seconds, for whatever a busy machine may delay
# The notebook in front. Newer JupyterLabs hide what is behind without taking it off the page.
FRONT = ".jp-NotebookPanel:visible:not([style*=content-visibility])"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
FOLDERS = ["JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"]
FOLDERS += ["JUPYTERLAB_SETTINGS_DIR", "JUPYTERLAB_WORKSPACES_DIR"]
SERVER = ["--no-browser", "--allow-root", "--expose-app-in-browser", "--ip=127.0.0.1"]
SERVER += ["--ServerApp.port_retries=0", "--KernelSpecManager.allowed_kernelspecs=python3"]
# Seconds, after which a server that nobody could end, since this process was killed, ends by itself.
SERVER += ["--MappingKernelManager.cull_idle_timeout=300", "--ServerApp.shutdown_no_activity_timeout=600"]
SETTINGS = {
    "@jupyterlab/apputils-extension/notification": {"fetchNews": "false"},  # else it asks, on top of the page
    "@jupyterlab/notebook-extension/tracker": {"windowingMode": "none", "scrollPastEnd": False},
}


@contextmanager
def browser():
    """A Chromium; without one the tests are skipped, or fail where HOOKLAB_REQUIRE_BROWSER=1."""
    try:
        playwright = sync_playwright().start()
    except Exception as error:  # its driver, a program of its own, does not run here
        give_up(f"playwright does not start ({error}): is libatomic missing (Debian and Ubuntu: libatomic1)?")
    try:
        yield playwright.chromium.launch(executable_path=find_browser(playwright), args=FLAGS)
    finally:
        playwright.stop()  # and with it the browser


def find_browser(playwright) -> str:
    """The path of a Chromium."""
    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
    paths = [os.environ.get("HOOKLAB_CHROME"), *map(shutil.which, names)]
    if Path(playwright.chromium.executable_path).exists():
        paths.append(playwright.chromium.executable_path)
    for path in filter(None, paths):
        return path
    give_up("no browser: install Chromium or Chrome, or run `playwright install chromium`, or set HOOKLAB_CHROME")


def give_up(why: str) -> NoReturn:
    (pytest.fail if os.environ.get("HOOKLAB_REQUIRE_BROWSER") == "1" else pytest.skip)(why)


@contextmanager
def page_on(folder: Path, *, locale: str = "en-US", viewport: dict[str, int] = VIEWPORT):
    """A page with a JupyterLab in it that serves `folder`. Both end with the block."""
    with browser() as chromium, running_lab(folder, folder.parent / "state") as address:
        page = chromium.new_context(viewport=viewport, locale=locale).new_page()
        page.set_default_timeout(DEADLINE * 1000)
        expect.set_options(timeout=DEADLINE * 1000)
        open_lab(page, address)
        yield page
        chromium.close()


@contextmanager
def running_lab(root: Path, state: Path):
    """The address of a JupyterLab that serves `root` and keeps all it writes in `state`. It ends with the block."""
    for plugin, settings in SETTINGS.items():
        path = state / "JUPYTERLAB_SETTINGS_DIR" / f"{plugin}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    token, log = secrets.token_hex(16), state / "log"
    options = [f"--port={port}", f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}"]
    command = [sys.executable, "-m", "jupyterlab", *SERVER, *options]
    own = os.environ | {name: str(state / name) for name in FOLDERS}  # the language switch is in sys.prefix
    if forked_kernels.SHARED in os.environ:
        forked_kernels.offer(state / "first", "python3", Path(os.environ[forked_kernels.SHARED]))
        own["JUPYTER_PATH"] = str(state / "first")  # before the python3 of the environment
    with log.open("w") as out:
        process = subprocess.Popen(command, env=own, stdout=out, stderr=out, start_new_session=True)
    try:
        wait_for_server(process, f"http://127.0.0.1:{port}/api?token={token}", log)
        yield f"http://127.0.0.1:{port}/lab?token={token}"
    finally:
        end(process)


def wait_for_server(process, address: str, log: Path) -> None:
    deadline = time.monotonic() + DEADLINE
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return urllib.request.urlopen(address, timeout=5).close()
        except OSError:
            time.sleep(0.1)
    pytest.fail(f"JupyterLab did not come up; its log:\n{log.read_text()[-5000:]}")


def end(process) -> None:
    """Ask, then insist: a server that is starting a kernel does not listen."""
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def ask(page, function: str, argument=None):
    """What a JavaScript function answers; `app` is JupyterLab, `panel` the notebook in front."""
    call = f"({function})(jupyterapp, jupyterapp.shell.currentWidget, argument)"
    late = f"new Promise((_, no) => setTimeout(no, {DEADLINE * 1000}, new Error('no answer in {DEADLINE} s')))"
    # Chromium knows the promise that it waits for by a weak reference alone, and loses it at times on a busy machine.
    asked = f"argument => window.hooklabAsked = Promise.race([{call}, {late}])"
    try:
        return page.evaluate(asked, argument)
    except Error as error:
        waits = function.startswith("async")  # and does nothing that must not be done twice
        if not (waits and "collected" in str(error)):
            raise
    return page.evaluate(asked, argument)


def wait_until(page, condition: str, argument=None) -> None:
    """Until a JavaScript function answers yes. Asked now and then: by default it is asked before every drawn frame."""
    page.wait_for_function(condition, arg=argument, polling=100)  # ms


def open_lab(page, address: str) -> None:
    page.goto(address)
    wait_until(page, "() => window.jupyterapp")
    ask(page, "async app => { await app.restored; app.shell.collapseLeft(); }")


def open_notebook(page, name: str) -> None:
    ask(page, "async (app, _, path) => { await app.commands.execute('docmanager:open', { path }); }", name)
    wait_until_drawn(page)


def wait_for_kernel(page) -> None:
    """Until the kernel of the notebook in front has answered: it must not be ended before it has begun."""
    # What JupyterLab asks it first is lost at times, where its sockets are not up yet, and is asked once only.
    ask(
        page,
        """async (app, panel) => {
          const { kernel } = panel.sessionContext.session;
          const again = setInterval(() => kernel.requestKernelInfo().catch(() => {}), 5000);
          try { await kernel.info; } finally { clearInterval(again); }
        }""",
    )


def close_notebook(page) -> None:
    """And end its kernel: who opens the notebook again while that goes on is given the kernel that dies."""
    session = ask(page, "(app, panel) => { const { id } = panel.sessionContext.session; panel.dispose(); return id; }")
    ask(page, "async (app, _, id) => { await app.serviceManager.sessions.shutdown(id); }", session)


def wait_until_drawn(page) -> None:
    """Until the notebook in front has its kernel, its prose and its outputs."""
    wait_until(page, "() => window.jupyterapp?.shell.currentWidget?.content?.widgets")
    ask(page, "async (_, panel) => { await panel.context.ready; await panel.sessionContext.ready; }")
    wait_until(
        page,
        """() => jupyterapp.shell.currentWidget.content.widgets.every(({ model, node }) => {
          const drawn = [...node.querySelectorAll('.jp-MarkdownOutput, .jp-OutputArea-output')];
          return drawn.length === (model.outputs?.length ?? 1) && drawn.every(part => part.hasChildNodes());
        })""",
    )


def start(page, name: str) -> None:
    """Open a notebook, and ask for every cell to be run. The kernel goes on behind other notebooks."""
    open_notebook(page, name)
    # What this answers is not waited for: it comes at the first error, also one that the tag raises-exception allows.
    ask(page, "app => { app.commands.execute('notebook:run-all-cells'); }")


def finish(page, name: str) -> None:
    """Wait until every cell of a started notebook has run and all is drawn. An error in a cell not tagged for it ends that."""
    ask(page, "async (app, _, path) => { await app.commands.execute('docmanager:open', { path }); }", name)
    wait_until(
        page,
        """() => {
          const { content, sessionContext } = jupyterapp.shell.currentWidget;
          const code = content.widgets.map(cell => cell.model).filter(model => model.type === 'code');
          const stopped = model => model.outputs.toJSON().some(output => output.output_type === 'error')
            && !model.getMetadata('tags')?.includes('raises-exception');
          return sessionContext.session.kernel.status === 'idle'
            && (code.some(stopped) || code.every(model => model.executionCount || !model.sharedModel.source.trim()));
        }""",
    )
    wait_until_drawn(page)


def cells(page) -> list[dict]:
    """What each cell of the notebook in front shows."""
    return ask(
        page,
        """async (app, panel) => {
          await Promise.allSettled([...panel.node.querySelectorAll('img')].map(image => image.decode()));
          const printed = output => output.dataset.mimeType === 'application/vnd.jupyter.stdout';
          const text = outputs => {  // a warning may come in the middle of what is printed, or after it
            const others = outputs.filter(output => !printed(output)).map(output => output.textContent);
            return [outputs.filter(printed).map(output => output.textContent).join(''), ...others].join('\\n');
          };
          return panel.content.widgets.map(({ model, node }) => ({
            count: model.executionCount ?? null,
            markdown: node.querySelector('.jp-MarkdownOutput')?.textContent ?? '',
            output: text([...node.querySelectorAll('.jp-OutputArea-output')]),
            errors: model.outputs?.toJSON().filter(output => output.output_type === 'error').length ?? 0,
            images: [...node.querySelectorAll('img, .jp-RenderedSVG svg')].map(
              image => image.naturalWidth ?? image.getBoundingClientRect().width),
          }));
        }""",
    )


def languages(page) -> set[str]:
    """Such as {'prose zh shown', 'prose en hidden', ...}: what is found in the notebook in front."""
    found = """(app, panel) => [...panel.node.querySelectorAll('.jp-RenderedHTMLCommon [lang]')].map(element =>
      `${element.closest('.hooklab-message') ? 'message' : 'prose'} ${element.lang} ` +
      (getComputedStyle(element).display === 'none' ? 'hidden' : 'shown'))"""
    return set(ask(page, found))


def choose(page, language: str) -> None:
    ask(page, "(app, panel, language) => app.commands.execute('hooklab:language-' + language)", language)


def button(page):
    """The button of the language switch in the toolbar of the notebook in front."""
    return page.locator(f'{FRONT} [data-command="hooklab:language-next"]')


def expected(language: str) -> set[str]:
    """What languages() finds in a notebook with prose and messages."""
    state = {lang: "shown" if language in (lang, "both") else "hidden" for lang in ("zh", "en")}
    return {f"{what} {lang} {state[lang]}" for what in ("prose", "message") for lang in state}


def expect_language(page, language: str) -> None:
    expect(button(page)).to_have_text(LABELS[language])
    assert languages(page) == expected(language)


def photograph_page(page, name: str) -> None:
    """Save what a person sees, tool bars and all, around the first drawn picture as NAME.page.png."""
    SCREENSHOTS.mkdir(exist_ok=True)
    page.set_viewport_size(PAGE)
    kinds = (".jp-RenderedSVG", ".jp-RenderedImage", ".jp-MarkdownOutput img")
    picture = page.locator(FRONT).locator(", ".join(f"{kind}:visible" for kind in kinds))
    if picture.count():
        picture.first.evaluate("it => it.scrollIntoView({ block: 'center' })")
    save(page, f"{name}.page", {"x": 0, "y": 0, **PAGE})
    page.set_viewport_size(VIEWPORT)


def photograph(page, name: str) -> None:
    """Save the whole notebook as NAME.1.png, NAME.2.png, ..., each as high as the window."""
    SCREENSHOTS.mkdir(exist_ok=True)
    for old in SCREENSHOTS.glob(f"{name}.[0-9]*.png"):
        old.unlink()
    page.wait_for_timeout(500)  # ms: after a switch of the language the place is kept for a moment
    scroller = page.locator(f"{FRONT} .jp-WindowedPanel-outer")
    box = scroller.bounding_box()
    for number, top in enumerate(range(0, scroller.evaluate("it => it.scrollHeight"), int(box["height"])), start=1):
        # The last slice cannot be scrolled up to the top: its upper part was on the picture before.
        known = top - scroller.evaluate("(it, top) => { it.scrollTop = top; return it.scrollTop; }", top)
        clip = box | {"y": box["y"] + known, "height": box["height"] - known}
        save(page, f"{name}.{number}", clip)


def save(page, name: str, clip: dict) -> None:
    """One picture. Chromium is asked itself: a third of the time of Playwright, which restyles the page before and after."""
    chromium = page.context.new_cdp_session(page)
    options = {"format": "png", "optimizeForSpeed": True, "clip": clip | {"scale": 1}}
    picture = chromium.send("Page.captureScreenshot", options)["data"]
    (SCREENSHOTS / f"{name}.png").write_bytes(base64.b64decode(picture))
    chromium.detach()


def words(text: str) -> str:
    """The text without terminal colours, with every run of white space as one space."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


def stored_texts(outputs: list[dict]) -> list[str]:
    """The texts that the outputs stored in an ipynb cell must show."""
    texts = []
    for output in outputs:
        data = output.get("data", {})
        if output["output_type"] == "error":
            texts.append(output["ename"])
        elif output.get("name") == "stdout":
            texts.append("".join(output["text"]))
        elif "text/html" in data:
            texts.append(html.unescape(re.sub(r"(?s)<style.*?</style>|<[^>]+>", "", "".join(data["text/html"]))))
        elif not stored_pictures([output]):
            texts.append("".join(data.get("text/plain", "")))
    return [words(text) for text in texts]


def stored_pictures(outputs: list[dict]) -> int:
    return sum(bool({"image/svg+xml", "image/png"} & set(output.get("data", {}))) for output in outputs)
