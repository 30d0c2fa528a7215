"""Binder, Codespaces and Docker: no build runs here, but what their files name exists, and they agree with each other."""

import fnmatch
import json
import re
import shlex
import tomllib

import notebook_form
import pytest
import yaml
from hooklab_desk import command

ROOT = notebook_form.ROOT
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PORT = 8888
TORCH_FOR_CPU = "https://download.pytorch.org/whl/cpu"


def text_of(file):
    return (ROOT / file).read_text(encoding="utf-8")


def dockerfile():
    """The instructions, as (name, what follows)."""
    lines = re.sub(r"^#.*\n", "", text_of("Dockerfile"), flags=re.MULTILINE).replace("\\\n", "").splitlines()
    return [tuple(line.split(None, 1)) for line in lines if line]


def copied():
    """The sources that the Dockerfile copies, in their order."""
    words = [shlex.split(what) for name, what in dockerfile() if name == "COPY"]
    return [source for line in words for source in line[:-1] if not source.startswith("--")]


def codespaces():
    return json.loads(re.sub(r"^\s*//.*\n", "", text_of(".devcontainer/devcontainer.json"), flags=re.MULTILINE))


def test_binder_gets_the_pins_pytorch_for_cpus_the_course_and_nothing_to_test_it():
    environment = yaml.safe_load(text_of(".binder/environment.yml"))
    *others, pip = environment["dependencies"]
    everywhere = yaml.safe_load(text_of("environment.yml"))
    assert others == [entry for entry in everywhere["dependencies"] if isinstance(entry, str)]
    pins = PROJECT["tool"]["uv"]["constraint-dependencies"]
    assert pip["pip"] == [f"--extra-index-url {TORCH_FOR_CPU}", *pins, "-e ..[lab]"]
    assert (ROOT / ".binder" / ".." / "pyproject.toml").is_file(), "pip starts in the folder of the file"


def test_binder_opens_a_notebook_that_exists():
    for page in ("docs/install.md", "docs/install.zh-CN.md"):
        (opened,) = re.findall(r"`lab/tree/(\S+)`", text_of(page))
        assert opened == f"notebooks/{command.FIRST}"
        assert (ROOT / opened).is_file()


def test_codespaces_installs_with_pytorch_for_cpus_and_starts_jupyterlab():
    settings = codespaces()
    installs = settings["postCreateCommand"].split(" && ")
    assert [line.split()[:3] for line in installs[:2]] == [["pip", "install", "uv"], ["uv", "pip", "install"]]
    assert "--torch-backend=cpu" in installs[1].split()
    assert installs[2].endswith("--editable .")
    for line in installs:
        assert all((ROOT / file).is_file() for file in re.findall(r"-r (\S+)", line))
    assert settings["forwardPorts"] == [PORT]
    assert list(settings["portsAttributes"]) == [str(PORT)]
    started = shlex.split(settings["postAttachCommand"])
    assert started[0] in PROJECT["project"]["scripts"]
    assert f"--port={PORT}" in started


def test_the_image_is_made_of_files_that_exist_and_that_docker_is_shown():
    first, *kept = [line for line in text_of(".dockerignore").splitlines() if line and not line.startswith("#")]
    assert first == "*"
    shown = [line[1:] for line in kept if line.startswith("!")]
    hidden = [line for line in kept if not line.startswith("!")]
    for source in copied():
        assert (ROOT / source).exists(), source
        assert any(fnmatch.fnmatch(source, pattern) for pattern in shown), source
        assert not any(fnmatch.fnmatch(source, pattern) for pattern in hidden), source
    for pattern in shown:
        assert fnmatch.filter(copied(), pattern), f"{pattern} is sent to Docker and copied nowhere"
    assert {"hooklab", "labextension", "notebooks", "docs", PROJECT["project"]["readme"]} <= set(copied())


def test_a_change_of_a_notebook_does_not_load_pytorch_again():
    instructions = dockerfile()
    (loads,) = (
        number for number, (name, what) in enumerate(instructions) if name == "RUN" and "--torch-backend=cpu" in what
    )
    before = [shlex.split(what) for name, what in instructions[:loads] if name == "COPY"]
    assert before == [["pyproject.toml", "./"]]
    assert copied()[-1] == "notebooks"
    assert not [what for name, what in instructions[loads + 1 :] if name == "RUN" and "--no-deps" not in what]


def test_the_container_runs_the_course_as_a_user_and_listens_outside():
    instructions = dockerfile()
    last = dict(instructions)
    created = re.search(r"useradd --create-home (\w+)", text_of("Dockerfile"))[1]
    assert last["USER"] == created != "root"
    assert last["WORKDIR"] == f"/home/{created}/hooklab"
    assert last["EXPOSE"] == str(PORT)
    started = json.loads(last["CMD"])
    assert started[0] in PROJECT["project"]["scripts"]
    assert started[1:] == ["lab", "--ip=0.0.0.0", f"--port={PORT}"]
    own = f"{last['WORKDIR']}/{command.FOLDER}"
    assert f"mkdir -p ~/hooklab/{command.FOLDER}" in text_of("Dockerfile")
    assert last["ENV"] == f"JUPYTER_DATA_DIR={own}/.jupyter"


@pytest.mark.parametrize("options", [json.loads(dict(dockerfile())["CMD"])[1:],
                                     shlex.split(codespaces()["postAttachCommand"])[1:]])  # fmt: skip
def test_jupyterlab_gets_the_options_of_a_container(options, tmp_path, monkeypatch):
    called = []
    monkeypatch.setattr(command.subprocess, "call", lambda arguments: called.append(arguments) or 0)
    assert command.main([*options, "--folder", str(tmp_path)]) == 0
    assert called[0][-len(options[1:]) :] == options[1:]


def test_the_documents_and_the_workflow_publish_the_port_of_the_image():
    own = f"{dict(dockerfile())['WORKDIR']}/{command.FOLDER}"
    for page in ("docs/install.md", "docs/install.zh-CN.md"):
        (line,) = re.findall(r"^docker run .*$", text_of(page), re.MULTILINE)
        assert f" -p 127.0.0.1:{PORT}:{PORT} " in line, "published to this machine alone"
        assert f":{own} " in line
        assert "docker build -t hooklab .\n" in text_of(page)
    workflow = yaml.safe_load(text_of(".github/workflows/image.yml"))
    (job,) = workflow["jobs"].values()
    runs = "\n".join(step.get("run", "") for step in job["steps"])
    assert f"-p 127.0.0.1:{PORT}:{PORT} " in runs
    assert set(re.findall(r"http://127.0.0.1:(\d+)/", runs)) == {str(PORT)}
    assert "docker build -t hooklab ." in runs
    assert [file for file in workflow[True]["push"]["paths"] if not (ROOT / file).is_file()] == []
    assert [file for file in re.findall(r"\S+\.ipynb", runs) if not (ROOT / file).is_file()] == []


@pytest.mark.parametrize("file", [".binder/environment.yml", ".devcontainer/devcontainer.json", "Dockerfile",
                                  ".github/workflows/image.yml", ".github/workflows/release.yml"])  # fmt: skip
def test_no_address_is_named_but_that_of_pytorchs_wheels_and_of_this_machine(file):
    addresses = set(re.findall(r"https?://[\w.:-]+", text_of(file)))
    assert addresses <= {"https://download.pytorch.org", f"http://127.0.0.1:{PORT}"}
