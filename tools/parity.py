"""`python tools/parity.py`: observe every kind of hook in every setting, and store it in notebooks/parity.yml.

What stands above `observed:` in that file is written by hand. `tables` makes of both what a page shows.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import atlas
import notebook_form
import yaml

PATH = notebook_form.NOTEBOOKS / "parity.yml"
TOOLS = Path(__file__).parent
OBSERVED = "observed:\n"
LIMIT_S = 300

WORDS = {
    "en": {"fires": "fires", "silent": "**silent**", "not": "—", "times": "{}×", "tracing": "{} ({}× in tracing)"},
    "zh": {"fires": "触发", "silent": "**不触发**", "not": "—", "times": "{} 次", "tracing": "{}（追踪时 {} 次）"},
}
HEADING = {"en": "## Where the 13 kinds of hooks survive", "zh": "## 13 种钩子在哪里还触发"}
LEGEND = {
    "en": "In one training step. **fires**: as often as in eager; **2×**: that often; **silent**: never, and no error;\n"
    "a type: this error; —: there is nothing to hang it on.",
    "zh": "在一步训练里。**触发**：次数与直接调用时相同；**2 次**：就是这个次数；**不触发**：一次也没有，也不报错；\n"
    "写着类型的：报这个错；—：没有可挂的地方。",
}


class Kind(NamedTuple):
    """A kind of hook: what it is called in both languages, and the call that registers it."""

    zh: str
    en: str
    call: str


def kinds() -> list[Kind]:
    """Those of the cheat sheet."""
    return [Kind(**row["called"], call=row["call"]) for row in atlas.on_the_sheet()]


def stored() -> dict:
    """The file: `groups`, `columns` and `notes`, and in `observed` what was seen, as {column: {kind: words}}."""
    table = yaml.safe_load(PATH.read_text(encoding="utf-8"))
    table["observed"] = {
        column: {kind: seen for seen, kinds in by_words.items() for kind in kinds}
        for column, by_words in table["observed"].items()
    }
    return table


def store(observed: dict[str, dict[str, str]]) -> None:
    """Write what was seen below the part that is written by hand; kinds that fare alike share a line."""
    lines = []
    for column, seen in observed.items():
        lines.append(f"  {column}:\n")
        for words in dict.fromkeys(seen.values()):
            alike = [kind for kind, found in seen.items() if found == words]
            lines.append(f"    {words}: [{', '.join(alike)}]\n")
    by_hand = PATH.read_text(encoding="utf-8").partition(OBSERVED)[0]
    PATH.write_text(by_hand + OBSERVED + "".join(lines), encoding="utf-8")


def two_processes(script: Path, *args: str, limit_s: float = LIMIT_S) -> None:
    """Run a script in two processes that talk with each other; none of them is left when this returns or raises."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TOOLS), str(notebook_form.ROOT)])}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    to_pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([*launch, str(script), *args], env=environment, **to_pipe) as runs:
        try:
            said, _ = runs.communicate(timeout=limit_s)
        except BaseException:
            # Asked to end, it ends its workers first; killed, it leaves them to their own limit.
            runs.terminate()
            with suppress(subprocess.TimeoutExpired):
                runs.communicate(timeout=60)
            runs.kill()
            raise
    if runs.returncode:
        raise RuntimeError(f"{script.name} failed:\n{said}")


def observed_by_two() -> dict[str, dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "observed.json")
        two_processes(TOOLS / "parity_workers.py", str(out))
        return json.loads(out.read_text(encoding="utf-8"))


def differences(observed: dict[str, dict[str, str]]) -> list[str]:
    """The cells in which what was seen now is another than what is stored, each by its name."""
    before = stored()["observed"]
    return [
        f"{kind} × {column}: stored {before.get(column, {}).get(kind)!r}, found {seen.get(kind)!r}"
        for column, seen in observed.items()
        for kind in dict.fromkeys([*before.get(column, {}), *seen])
        if before.get(column, {}).get(kind) != seen.get(kind)
    ]


def page(language: str) -> str:
    """docs/atlas.md as a whole: every name, then where the 13 kinds of the cheat sheet survive."""
    return f"{atlas.page(language)}\n{HEADING[language]}\n\n{tables(language)}"


def tables(language: str) -> str:
    """For each group of columns a table with a row for each kind of hook, what was done, and the notes."""
    table, parts = stored(), [LEGEND[language]]
    for group, title in table["groups"].items():
        columns = [column for column in table["columns"] if column["group"] == group]
        notes = [note for note in table["notes"] if {place["id"] for place in columns} & set(note["columns"])]
        lines = ["| | " + " | ".join(column["name"][language] for column in columns) + " |"]
        lines.append("|" + "---|" * (len(columns) + 1))
        for kind in kinds():
            cells = [_cell(table["observed"], column["id"], kind.en, notes, language) for column in columns]
            lines.append(f"| {getattr(kind, language)} | {' | '.join(cells)} |")
        done = [f"- {column['name'][language]}{': ' if language == 'en' else '：'}{column['did'][language]}"
                for column in columns]  # fmt: skip
        said = [f"{number}. {note[language]}" for number, note in enumerate(notes, start=1)]
        parts += [f"### {title[language]}", "\n".join(done), "\n".join(lines), "\n".join(said)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _cell(observed: dict, column: str, kind: str, notes: list[dict], language: str) -> str:
    words, seen = WORDS[language], observed[column][kind]
    what, _, tracing = seen.partition(", ")
    name, _, more = what.partition(" ")
    if name == "fires":
        shown = words["fires"] if what == observed["eager"][kind] and column != "eager" else words["times"].format(more)
    else:
        shown = f"`{more}`" if name == "refused" else words[name]
    if tracing:
        shown = words["tracing"].format(shown, re.findall(r"\d+", tracing)[0])
    numbers = [str(number) for number, note in enumerate(notes, start=1)
               if column in note["columns"] and kind in note["kinds"]]  # fmt: skip
    return shown + (f" <sup>{', '.join(numbers)}</sup>" if numbers else "")


def main() -> None:
    # PyTorch takes seconds to load, and a page that is only written needs none of it.
    import parity_probes

    from hooklab.course.environment import STORED_TORCH, other_torch

    if other_torch():
        sys.exit(f"the table is of PyTorch {STORED_TORCH}, and this is another")
    observed = {name: parity_probes.column(probe) for name, probe in parity_probes.PROBES.items()}
    observed |= observed_by_two()
    print(*differences(observed), sep="\n")
    store(observed)


if __name__ == "__main__":
    main()
