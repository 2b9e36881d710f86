"""Objects by name: `module:object` or `file.py:object`."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def load_object(name: str) -> Any:
    """Return the object of `module:object` or `file.py:object`. Raises the import's errors, or AttributeError."""
    module, _, attribute = name.rpartition(":")
    own = module.startswith("rlctl.")
    return getattr(importlib.import_module(module) if own else load_module(module), attribute)


def load_module(name: str) -> ModuleType:
    """Import a module by its name, looked up in the current directory too, or by its file.

    A file inside a package is imported as its submodule, so that its siblings are found. Raises the import's errors.
    """
    path = Path(name)
    folder = path.resolve().parent if path.suffix == ".py" else Path.cwd()
    inside = [path.stem]
    while path.suffix == ".py" and (folder / "__init__.py").is_file():
        inside.insert(0, folder.name)
        folder = folder.parent
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if path.suffix != ".py" or len(inside) > 1:
        return importlib.import_module(name if path.suffix != ".py" else ".".join(inside))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module
