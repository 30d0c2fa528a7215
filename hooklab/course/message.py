"""One message in two languages, as HTML that the language switch rules and as plain text."""

import html
import re
from dataclasses import dataclass
from typing import Literal

__all__ = ["Message"]


@dataclass(frozen=True)
class Message:
    """What a check or the environment check says.

    Attributes:
        kind: `right`, `wrong`, `todo` (not attempted yet) or `note`.
        zh, en: the same thing in both languages; `code` in backticks, one paragraph per line.
        reason: a short name for why an answer was refused; empty when it was not.
    """

    kind: Literal["right", "wrong", "todo", "note"]
    zh: str
    en: str
    reason: str = ""

    def _repr_html_(self) -> str:
        halves = "".join(f'<div lang="{lang}">{_html(text)}</div>' for lang, text in (("zh", self.zh), ("en", self.en)))
        return f'<div class="hooklab-message hooklab-{self.kind}">{halves}</div>'

    def __repr__(self) -> str:
        return f"{self.zh}\n{self.en}"


def _html(text: str) -> str:
    escaped = html.escape(text, quote=False).replace("\n", "<br>")
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
