"""What the docstrings say of arguments is what the signatures say."""

import ast
import dataclasses
import inspect
import re

import pytest

import ms_optim
from ms_optim import _arguments

CLASSES = [getattr(ms_optim, name) for name in ms_optim.__all__ if inspect.isclass(getattr(ms_optim, name))]
every_class = pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)


def documented_arguments(cls):
    """Return the documented arguments and their default, None where none is given."""
    args = inspect.getdoc(cls).split("Args:\n", 1)[1]
    args = re.split(r"\n\S", args, maxsplit=1)[0]
    found = {}
    for entry in re.split(r"\n(?=    \w)", "\n" + args):
        name = re.match(r"\s*(\w+) \(", entry)
        if name:
            default = re.findall(
                r"Default:\s+``(.*?)`` \.", re.sub(r"\n\s*- .*?(?=\n\s{0,8}\S|\Z)", "", entry, flags=re.S)
            )
            found[name.group(1)] = default[-1] if default else None
    return found


def signature_defaults(cls):
    """Return the arguments of the constructor with their defaults, the shared ones included."""
    defaults = {}
    for name, parameter in inspect.signature(cls.__init__).parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            defaults |= {field.name: field.default for field in dataclasses.fields(_arguments.Options)}
        elif name != "self":
            defaults[name] = parameter.default
    return defaults


@every_class
def test_every_argument_is_documented_in_order(cls):
    assert list(documented_arguments(cls)) == list(signature_defaults(cls))


@every_class
def test_documented_defaults_are_those_of_the_signature(cls):
    documented = documented_arguments(cls)
    for name, default in signature_defaults(cls).items():
        if default is inspect.Parameter.empty:
            assert documented[name] is None, f"{name} has no default"
        else:
            assert documented[name] is not None, f"the default of {name} is not documented"
            assert ast.literal_eval(documented[name]) == default, name


@every_class
def test_docstrings_have_every_section(cls):
    doc = inspect.getdoc(cls)
    for section in ("Args", "Inputs", "Outputs", "Raises", "Supported Platforms", "Examples"):
        assert f"\n{section}:\n" in doc, section
    assert "arxiv.org" in doc, "the source of the rule"
    assert not re.search(r"^\s*\{\w+(\|.*)?\}$", doc, re.M), "a place for shared text was not filled"


@every_class
def test_examples_run(cls):
    code = "\n".join(line[4:] for line in inspect.getdoc(cls).splitlines() if line.strip().startswith((">>> ", "... ")))
    code = "\n".join(line.removeprefix(">>> ").removeprefix("... ") for line in code.splitlines())
    assert cls.__name__ in code
    exec(compile(code, cls.__name__, "exec"), {})


def test_shared_arguments_are_one_list():
    """The types for editors, the defaults and the documentation name the same arguments."""
    names = [field.name for field in dataclasses.fields(_arguments.Options)]
    assert list(_arguments.Shared.__annotations__) == names
