"""The update rules in float64 NumPy, written from the papers; nothing here imports the package or MindSpore.

Each file has one class, whose name is the optimizer's and a name of this package.
"""

import importlib
import pathlib

from .base import Reference

for _path in sorted(pathlib.Path(__file__).parent.glob("[a-z]*.py")):
    _module = importlib.import_module(f".{_path.stem}", __package__)
    globals().update({name: x for name, x in vars(_module).items() if isinstance(x, type) and issubclass(x, Reference)})

# By the name of a kernel: its reference, and what that states of it.
_FORMULAS = dict.fromkeys(x for x in globals().values() if isinstance(x, type) and issubclass(x, Reference))
KERNELS = {name: (formula, *row) for formula in _FORMULAS for name, *row in vars(formula).get("kernels", ())}
