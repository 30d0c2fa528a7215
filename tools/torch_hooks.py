"""Every public name with `hook` in the PyTorch that is installed: `python tools/torch_hooks.py` prints them, one a line."""

import contextlib
import importlib
import inspect
import io
import pkgutil
import warnings
from types import ModuleType

import torch

# Tests, copies of other projects, and a module that asks for TensorBoard.
LEFT_OUT = ("torch.testing", "torch.onnx._internal", "torch._vendor", "torch.__", "torch.utils.tensorboard")


def installed() -> list[str]:
    """Every public name with 'hook' in PyTorch, as it is imported; what has several names is listed once."""
    found: dict[str, None] = {}
    seen: set[int] = set()
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        modules = _modules()
        owners: dict[type, str] = {}
        for path, module in modules.items():
            for name, value in list(vars(module).items()):
                if inspect.isclass(value) and f"{value.__module__}.".startswith("torch.") and name[0] != "_":
                    owners.setdefault(value, f"{path}.{name}")
                home = getattr(value, "__module__", None)
                at_home = home in modules and getattr(modules[home], name, None) is value
                full = value.__name__ if inspect.ismodule(value) else f"{home if at_home else path}.{name}"
                if "hook" in name.lower() and name[0] != "_" and not _private(full):
                    found[full] = None
        for owner, path in owners.items():
            home = f"{owner.__module__}.{owner.__qualname__}"
            for name, value in vars(owner).items():
                value = getattr(value, "__func__", value)  # a class method of the class itself
                full = f"{path if _private(home) else home}.{name}"
                if "hook" in name.lower() and name[0] != "_" and not _private(full) and id(value) not in seen:
                    seen.add(id(value))
                    found[full] = None
    return sorted(found)


def _modules() -> dict[str, ModuleType]:
    """Every public module of PyTorch that can be imported here."""
    found, packages = {"torch": torch}, [torch]
    while packages:
        package = packages.pop()
        for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if info.name.startswith(LEFT_OUT) or info.name.rpartition(".")[2][0] == "_":
                continue
            with contextlib.suppress(Exception):  # it asks for what is not installed
                found[info.name] = importlib.import_module(info.name)
                packages += [found[info.name]] if hasattr(found[info.name], "__path__") else []
    return found


def _private(path: str) -> bool:
    return any(part[0] == "_" and part[:2] != "__" for part in path.split("."))


if __name__ == "__main__":
    print(*installed(), sep="\n")
