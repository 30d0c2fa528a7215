"""The pieces of a slide as HTML: prose, code, outputs."""

import base64
import mimetypes
import re
from html import escape
from pathlib import Path

from docutils.utils.math.latex2mathml import tex2mathml
from nbconvert.filters import strip_ansi
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from nbformat import NotebookNode
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

LANGUAGE_BLOCK = re.compile(r'^<div lang="\w+">\n+|\n+</div>$', re.MULTILINE)
PICTURES = ("image/svg+xml", "image/png", "image/jpeg")


class Prose(IPythonRenderer):
    """Formulas are MathML, which a browser draws itself; a link leads to other slides or out of the course, or is only words."""

    def __init__(self, language: str, folder: Path, names: set[str]):
        super().__init__(escape=False, exclude_anchor_links=True)
        self.language, self.folder, self.names = language, folder, names

    def inline_math(self, body: str) -> str:
        return tex2mathml(body)

    def block_math(self, body: str) -> str:
        return f'<p class="formula">{tex2mathml(body, as_block=True)}</p>\n'

    multiline_math = block_math

    def codespan(self, text: str) -> str:
        return f"<code>{breakable(escape(text, quote=False))}</code>"

    def block_code(self, code: str, info: str | None = None) -> str:
        return code_block(code) if (info or "").startswith("py") else text_block(code)

    def link(self, text: str, url: str, title: str | None = None) -> str:
        if url.startswith(("https:", "http:")):
            return f'<a href="{escape(url)}">{text}</a>'
        name = url.partition("#")[0].removesuffix(".ipynb")
        return f'<a href="{name}.{self.language}.html">{text}</a>' if name in self.names else text

    def image(self, text: str, url: str, title: str | None = None) -> str:
        file, kind = self.folder / url, mimetypes.guess_type(url)[0]
        return picture(file.read_bytes(), kind or "image/png", re.sub("<[^>]+>", "", text)) if file.is_file() else text


class Pieces:
    """Makes them, for the slides of one language of a notebook that lies in `folder`."""

    def __init__(self, language: str, folder: Path, names: set[str]):
        self.markdown = MarkdownWithMath(Prose(language, folder, names))

    def prose(self, source: str) -> str:
        return self.markdown.render(LANGUAGE_BLOCK.sub("", source)).strip()

    def code(self, source: str) -> list[str]:
        return [code_block(source)] if source.strip() else []

    def output(self, output: NotebookNode) -> str:
        if output.output_type == "stream":
            return text_block(output.text, output.name)
        if output.output_type == "error":
            return text_block(f"{output.ename}: {output.evalue}", "stderr")
        for kind in PICTURES:
            if kind in output.data:
                data = output.data[kind]
                raw = data.encode() if kind == "image/svg+xml" else base64.b64decode(data)
                words = output.metadata.get(kind, {}).get("alt") or output.data.get("text/plain", "")
                return picture(raw, kind, " ".join(words.split()))
        if "text/html" in output.data:
            return f'<div class="output">{output.data["text/html"]}</div>'
        return text_block(output.data.get("text/plain", ""))

    def explanation(self, text: str) -> str:
        """What a check says once a guess has been made; each of its lines is a paragraph."""
        return f'<div class="explanation">{self.prose(re.sub(chr(10), chr(10) * 2, text))}</div>'


def code_block(source: str) -> str:
    return f'<pre class="code">{highlight(source, PythonLexer(), HtmlFormatter(nowrap=True)).rstrip()}</pre>'


def text_block(text: str, kind: str = "stdout") -> str:
    """What is printed, a line of it in an element of its own: a long one goes on below, a little to the right."""
    lines = strip_ansi(text).rstrip("\n").split("\n")
    shown = "".join(f"<span>{breakable(escape(line)) or '&nbsp;'}</span>" for line in lines)
    return f'<pre class="output {kind}">{shown}</pre>'


def picture(content: bytes, kind: str, alt: str) -> str:
    data = base64.b64encode(content).decode()
    return f'<figure><img src="data:{kind};base64,{data}" alt="{escape(alt)}"></figure>'


def breakable(html: str) -> str:
    """Long names may go on in the next line after a dot or an underscore; numbers and the dots of a version may not."""
    return re.sub(r"(?<=[A-Za-z0-9\]\)])([._]+)(?=[A-Za-z])", r"\1<wbr>", html)
