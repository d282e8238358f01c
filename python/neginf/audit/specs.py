"""Adapters by name: `module:Class`, or `path/to/file.py:Class`."""

import importlib
import importlib.util
import inspect
from pathlib import Path

from neginf.audit.adapter import Adapter

BUILT_IN = ("neginf_", "torch_", "flash_attn", "flashinfer", "flash_mla", "xformers")


def built_in():
    """The specs of the adapters in this package."""
    return [s for name in BUILT_IN for s in specs_in(f"neginf.audit.adapters.{name}")]


def specs_in(source):
    """The specs of all adapters that a module, or a file, defines; or `source` if it is a spec."""
    if not Path(source).exists() and ":" in source:
        return [source]
    module = _import(source)
    classes = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value)
        and issubclass(value, Adapter)
        and value.__module__ == module.__name__
        and value.name
    ]
    if not classes:
        raise ValueError(
            f"adapter: got {source}, which defines none; accepted is a file or module "
            "with a subclass of neginf.audit.Adapter that has a name"
        )
    return [f"{source}:{name}" for name in classes]


def load(spec):
    """The class that a spec names."""
    source, _, name = spec.rpartition(":")
    module = _import(source)
    if not hasattr(module, name):
        raise ValueError(f"adapter: got {spec}; accepted is a class that {source} defines")
    return getattr(module, name)


def _import(source):
    path = Path(source)
    if path.suffix != ".py":
        try:
            return importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise ValueError(f"adapter: got {source}: {error}; accepted is a module") from None
    if not path.exists():
        raise ValueError(f"adapter: got {source}, which does not exist; accepted is a file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
