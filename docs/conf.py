"""How the site is made: `pip install ".[docs]"`, then `sphinx-build -W -b html docs docs/_build`."""

import dataclasses
import inspect
from importlib.metadata import version as version_of

from docutils import nodes

import ms_optim
from ms_optim.arguments.options import Options

project = "ms_optim"
author = project_copyright = "the authors of ms_optim"
version = release = version_of("ms_optim")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.napoleon", "sphinx_copybutton"]
autosummary_generate = False
# Only what a user types is copied, without prompts and without what is printed.
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3

autodoc_typehints = "none"  # the docstrings state them
autodoc_member_order = "bysource"
# Headings of MindSpore's docstrings.
napoleon_custom_sections = ["Inputs", "Outputs", "Supported Platforms"]
napoleon_use_ivar = True
napoleon_use_rtype = False

html_theme = "furo"
html_title = "ms_optim"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = html_copy_source = False
pygments_dark_style = "github-dark"
# One argument a line, where a signature is longer.
python_maximum_signature_line_length = 80
html_math_renderer = "mathml"


def names_without_page(documented):
    """Return the package's public names that are not among the documented ones, which are full names."""
    return [name for name in ms_optim.__all__ if f"ms_optim.{name}" not in documented]


def check_public_names(app, env):
    """Fail the build where a public name has no page."""
    missing = names_without_page(env.get_domain("py").objects)
    if missing:
        raise ValueError(f"no page documents {', '.join(missing)}: add an autoclass or autofunction directive")


def constructor_signature(app, what, name, shown, options, signature, returns):
    """Return the arguments of a class's constructor; Sphinx would show those of MindSpore's ``Cell.__new__``."""
    if what != "class" or not inspect.isfunction(shown.__init__):
        return None
    _, *arguments = inspect.signature(shown.__init__).parameters.values()
    arguments = [argument.replace(annotation=argument.empty) for argument in arguments]
    if arguments and arguments[-1].kind is inspect.Parameter.VAR_KEYWORD and hasattr(shown, "keywords"):
        arguments[-1:] = shared_arguments(shown, [argument.name for argument in arguments])
    return str(inspect.Signature(arguments)), None


def shared_arguments(optimizer, own):
    """Return the keyword arguments that an optimizer shares with the others, in place of ``**shared``."""
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    keyword = inspect.Parameter.KEYWORD_ONLY
    names = [name for name in optimizer.keywords() if name in defaults and name not in own]
    return [inspect.Parameter(name, keyword, default=defaults[name]) for name in names]


def list_public_names(app, docname, source):
    """Fill the page that lists the public names: optimizers, other classes, functions."""
    if docname != "api":
        return
    public = {name: getattr(ms_optim, name) for name in ms_optim.__all__}
    optimizers = [cls.__name__ for cls in ms_optim.OPTIMIZERS]
    classes = [name for name, made in public.items() if inspect.isclass(made) and name not in optimizers]
    functions = [name for name, made in public.items() if not inspect.isclass(made)]
    for kind, names in (("optimizers", optimizers), ("classes", classes), ("functions", functions)):
        rows = "\n".join(f"   ~ms_optim.{name}" for name in sorted(names, key=str.lower))
        table = f"```{{eval-rst}}\n.. autosummary::\n   :nosignatures:\n\n{rows}\n```"
        source[0] = source[0].replace(f"% {kind}", table)


def trim_defaults(app, what, name, shown, options, lines):
    """Take out the space that MindSpore's docstrings have before the full stop after a default."""
    lines[:] = [line.replace("`` .", "``.") for line in lines]


def finish_pages(app, doctree):
    """Link each picture to its file at full size, and take out the empty lines that end examples for doctest."""
    for image in doctree.findall(nodes.image):
        image["scale"] = 100  # Sphinx links what has a scale
    for block in doctree.findall(nodes.literal_block):
        if block.astext().endswith("\n"):
            block[:] = [nodes.Text(block.astext().rstrip("\n"))]


def write_math(as_block):
    """Return what writes a formula as MathML: browsers draw it themselves, no script or font is loaded for it."""

    def write(translator, node):
        from docutils.utils.math.latex2mathml import tex2mathml

        formula = tex2mathml(node.astext(), as_block=as_block)
        translator.body.append(f'<div class="formula">{formula}</div>' if as_block else formula)
        raise nodes.SkipNode

    return write


def setup(app):
    """Add the check, the signatures, the list of names and the formulas to Sphinx."""
    app.connect("env-check-consistency", check_public_names)
    app.connect("autodoc-process-signature", constructor_signature)
    app.connect("autodoc-process-docstring", trim_defaults)
    app.connect("source-read", list_public_names)
    app.connect("doctree-read", finish_pages)
    app.add_html_math_renderer("mathml", (write_math(False), None), (write_math(True), None))
    return {"parallel_read_safe": True}
