"""`python -m ulysses_jax verify`: loads a case, verifies it on a mesh and prints the table."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from rich.console import Console

from ulysses_jax.parallel.backend import Processes, start_backend
from ulysses_jax.parallel.mesh import make_mesh
from ulysses_jax.verification.case import Case
from ulysses_jax.verification.command_line import VerifyConfig
from ulysses_jax.verification.packed_gpt import packed_gpt
from ulysses_jax.verification.verify import verify_case

_HOW = "NAME of --model FILE.py:NAME is a function without arguments that returns a Case"


def run_verify(config: VerifyConfig) -> int:
    """Prints the report of a case and returns 0 if every check passed, else 1.

    Raises:
      ValueError: there is no such case or mesh, or the case cannot be verified on it.
    """
    start_backend(config.mesh.simulated_devices, Processes())
    mesh = make_mesh(config.mesh.data, config.mesh.seq)
    case = packed_gpt(mesh) if config.model is None else load_case(config.model)
    report = verify_case(case, mesh)
    Console().print(report)
    return 0 if report.passed else 1


def load_case(place: str) -> Case:
    """The case that the function at "FILE.py:NAME" or "module:NAME" returns.

    Raises:
      ValueError: there is no such file, module or function, or it returns something else.
    """
    source, _, name = place.rpartition(":")
    module = _load_file(Path(source)) if source.endswith(".py") else _load_module(source)
    make = getattr(module, name, None)
    if not callable(make):
        raise ValueError(f"model is {place!r}, but {source} has no function {name!r}; {_HOW}")
    case = make()
    if not isinstance(case, Case):
        raise ValueError(f"model is {place!r}, which returned a {type(case).__name__}; {_HOW}")
    return case


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"model names the file {path}, which does not exist; {_HOW}")
    # A name that hides no module: the file may be called flax.py.
    name = f"ulysses_jax_verified_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As `python FILE.py` would: it may import what lies beside it.
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _load_module(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise ValueError(
            f"model names the module {name!r}, but there is no {error.name!r}; name a module that "
            "can be imported from here, or a FILE.py"
        ) from error
