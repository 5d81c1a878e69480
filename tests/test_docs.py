"""What the docstrings say of arguments is what the signatures say."""

import ast
import dataclasses
import doctest
import inspect
import io
import re

import pytest
from mindspore import nn

import ms_optim
from ms_optim.arguments.options import Options, Shared

PUBLIC = [getattr(ms_optim, name) for name in ms_optim.__all__]
OPTIMIZERS = ms_optim.OPTIMIZERS
BASES = [ms_optim.FusedOptimizer]
SCHEDULES = [x for x in PUBLIC if inspect.isclass(x) and issubclass(x, nn.Cell) and x not in [*OPTIMIZERS, *BASES]]
FUNCTIONS = [x for x in PUBLIC if inspect.isfunction(x)]
TOOLS = [ms_optim.SimulatedWorkers]
CALLBACKS = [ms_optim.AveragedWeights, ms_optim.CheckpointSaver, ms_optim.OptimizerMonitor, ms_optim.QKClip]
CALLBACKS += [ms_optim.Quantized, ms_optim.RadialBrake, ms_optim.SparseTopK]  # which have the same sections

DOCUMENTED = [*OPTIMIZERS, *BASES, *SCHEDULES, *FUNCTIONS, *TOOLS, *CALLBACKS]
every_name = pytest.mark.parametrize("public", DOCUMENTED, ids=lambda public: public.__name__)


def documented_arguments(public):
    """Return the documented arguments and their default, None where none is given."""
    doc = inspect.getdoc(public)
    if "Args:\n" not in doc:
        return {}
    args = doc.split("Args:\n", 1)[1]
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


def signature_defaults(public):
    """Return the arguments of the constructor or function with their defaults, the shared ones included."""
    defaults = {}
    if public is ms_optim.WeightDecaySchedule:
        # Its constructor is that of MindSpore's Cell.
        return defaults
    signature = inspect.signature(public.__init__ if inspect.isclass(public) else public)
    for name, parameter in signature.parameters.items():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD and public in FUNCTIONS:
            continue  # whatever its user names
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            taken = public.keywords()
            shared = {field.name: field.default for field in dataclasses.fields(Options)}
            defaults |= {name: default for name, default in shared.items() if name in taken and name not in defaults}
        elif name != "self":
            defaults[name] = parameter.default
    return defaults


@every_name
def test_every_argument_is_documented_in_order(public):
    assert list(documented_arguments(public)) == list(signature_defaults(public))


@every_name
def test_documented_defaults_are_those_of_the_signature(public):
    documented = documented_arguments(public)
    for name, default in signature_defaults(public).items():
        if default is inspect.Parameter.empty:
            assert documented[name] is None, f"{name} has no default"
        else:
            assert documented[name] is not None, f"the default of {name} is not documented"
            assert ast.literal_eval(documented[name]) == default, name


def test_every_public_name_is_looked_at():
    assert set(PUBLIC) == {*DOCUMENTED, ms_optim.Loaded, ms_optim.ParamGroups, ms_optim.Rule, ms_optim.SpoiledError}
    assert min(len(OPTIMIZERS), len(SCHEDULES), len(FUNCTIONS)) > 1


@every_name
def test_docstrings_have_every_section(public):
    doc = inspect.getdoc(public)
    cell = ("Inputs", "Outputs", "Raises", "Supported Platforms", "Examples")
    tool = ("Attributes", "Inputs", "Outputs", "Raises", "Examples")
    function = ("Returns", "Raises", "Examples")
    callback = ("Raises", "Examples")
    base = ("Attributes", *cell)
    kinds = {function: FUNCTIONS, tool: TOOLS, callback: CALLBACKS, base: BASES}
    sections = next((sections for sections, kind in kinds.items() if public in kind), cell)
    if signature_defaults(public):
        sections = ("Args", *sections)
    assert [line[:-1] for line in doc.splitlines() if re.fullmatch(r"[A-Z][\w ]+:", line)] == list(sections)
    if public in OPTIMIZERS:
        assert "arxiv.org" in doc, "the source of the rule"
    assert not re.search(r"^\s*\{\w+(\|.*)?\}$", doc, re.M), "a place for shared text was not filled"


@every_name
def test_examples_run(public, monkeypatch):
    """And print what the docstring says they print."""
    monkeypatch.setenv("COLUMNS", "100")
    doc = inspect.getdoc(public)
    assert re.search(rf">>> from ms_optim import (.*, )?{public.__name__}\b", doc)
    report = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(doctest.DocTestParser().get_doctest(doc, {}, public.__name__, None, None), out=report.write)
    assert runner.tries > 1
    assert runner.failures == 0, report.getvalue()


def test_shared_arguments_are_one_list():
    """The types for editors, the defaults and the documentation name the same arguments."""
    names = [field.name for field in dataclasses.fields(Options)]
    assert sorted(Shared.__annotations__) == sorted(names)
