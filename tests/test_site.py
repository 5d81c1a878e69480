"""The pages in docs: every public name has one, what they run prints what they say, what they link to is there."""

import dataclasses
import doctest
import importlib.util
import io
import re
import sys
import types

import numpy as np
import pytest
import reference
from cases import SCENARIOS, Case
from harness import Pair, tensor
from mindspore import Parameter
from sources import ROOT

import ms_optim

DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md") if "_build" not in page.parts)
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in (*PAGES, *sorted(ROOT.glob("README*.md")))}
every_page = pytest.mark.parametrize("page", TEXTS)


def module(path):
    """Import a file that belongs to no package; graphs are compiled from the sources of modules."""
    spec = importlib.util.spec_from_file_location(f"site_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


conf = module(DOCS / "conf.py")
OWN = Case(module(ROOT / "examples" / "own_optimizer.py").AdaBelief, reference.AdaBelief, {})


def documented():
    return set(re.findall(r"^\.\. auto(?:class|function):: (\S+)$", "\n".join(TEXTS.values()), re.M))


def test_every_public_name_has_a_page():
    assert conf.names_without_page(documented()) == []


@pytest.mark.parametrize("page", ["README.md", "README_zh.md"])
def test_every_optimizer_has_a_row_in_the_first_table(page):
    found = re.findall(r"^\| \[`([A-Z]\w+)`\]\(docs/optimizers/(\w+)\.md\) \|", TEXTS[page], re.M)
    assert found == [(cls.__name__, cls.__module__.rpartition(".")[2]) for cls in ms_optim.OPTIMIZERS]


def test_every_optimizer_is_listed_where_one_is_chosen():
    modules = [cls.__module__.rpartition(".")[2] for cls in ms_optim.OPTIMIZERS]
    index = TEXTS["docs/optimizers/index.md"]
    assert {page.stem for page in (DOCS / "optimizers").glob("*.md")} == {"index", *modules}
    for cls, module in zip(ms_optim.OPTIMIZERS, modules):
        assert f"[{cls.__name__}]({module}.md)" in index
        # One of matrices alone takes no whole network.
        assert (ROOT / "examples" / "mindformers" / f"{module}.yaml").exists() == (cls.dimensions is None)


@pytest.mark.parametrize("name", ["Lamb", "fold_residuals"])
def test_a_public_name_without_a_page_fails_the_build(name):
    objects = dict.fromkeys(documented())
    env = types.SimpleNamespace(get_domain=lambda domain: types.SimpleNamespace(objects=objects))
    conf.check_public_names(None, env)
    del objects[f"ms_optim.{name}"]
    with pytest.raises(ValueError, match=f"no page documents {name}:"):
        conf.check_public_names(None, env)


def test_messages_that_a_page_quotes_are_those_of_the_package():
    quoted = re.findall(r'"`([^`]+)`"', TEXTS["docs/troubleshooting.md"].replace("\n", " "))
    # Parts of one text in several lines follow each other without quotes between them.
    said = "".join(re.sub(r'"\s*\n\s*f?"', "", file.read_text()) for file in (ROOT / "ms_optim").rglob("*.py"))
    assert len(quoted) > 7
    missing = [part for text in quoted for part in text.split("...") if part.strip() not in said]
    assert missing == []


@pytest.mark.parametrize("page", [page for page, text in TEXTS.items() if ">>> " in text])
def test_what_a_page_runs_prints_what_it_says(page, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.chdir(ROOT)
    # The fence that ends a block would be taken for output.
    text = re.sub(r"^```.*$", "", TEXTS[page], flags=re.M)
    report = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    session = doctest.DocTestParser().get_doctest(text, {"__name__": "__main__"}, page, page, None)
    runner.run(session, out=report.write, clear_globs=False)
    assert runner.tries > 1
    assert runner.failures == 0, report.getvalue()
    # An optimizer with which the page ends before its first step takes it here.
    for optimizer in [value for value in session.globs.values() if isinstance(value, ms_optim.FusedOptimizer)]:
        if int(optimizer.global_step.asnumpy()[0]) == 0:
            optimizer(tuple(tensor(np.ones(p.shape), "float32") for p in optimizer.parameters))


def test_the_start_page_runs_the_same_in_chinese():
    blocks = [re.findall(r"^```.*?^```$", TEXTS[f"docs/start{tongue}.md"], re.M | re.S) for tongue in ("", "_zh")]
    assert len(blocks[0]) > 3
    assert blocks[0] == blocks[1]


@every_page
def test_links_lead_somewhere(page):
    """In the repository's view, too; the site's build checks its own."""
    folder = (ROOT / page).parent
    text = re.sub(r"^```.*?^```$", "", TEXTS[page], flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = (folder / path).resolve() if path else ROOT / page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
            assert anchor in slugs, link


def test_every_picture_is_in_the_gallery_with_its_command():
    sections = TEXTS["docs/gallery.md"].split("\n## ")[1:]
    shown = [re.findall(r"!\[[^]]+\]\((\w+\.\w+)\)", section) for section in sections]
    assert all(len(names) == 1 for names in shown)
    assert {name for (name,) in shown} == {path.name for kind in ("png", "svg") for path in DOCS.glob(f"*.{kind}")}
    for (name,), section in zip(shown, sections):
        commands = "".join(re.findall(r"^```bash\n(.*?)^```$", section, re.M | re.S)).replace("\\\n", " ").splitlines()
        scripts = [re.match(r"python (\S+\.py|-m ms_optim \w+) |pip install ", command) for command in commands]
        assert all(scripts), commands
        assert all((ROOT / found[1]).exists() for found in scripts if found and str(found[1]).endswith(".py"))
        # The last command draws the picture; the others make what it needs.
        assert f"docs/{name}" in commands[-1] if commands else name.endswith(".svg") and "by hand" in section


def test_the_index_lists_every_public_name_once():
    page = [TEXTS["docs/api.md"]]
    conf.list_public_names(None, "api", page)
    assert sorted(re.findall(r"^   ~?ms_optim\.(\w+)$", page[0], re.M)) == sorted(ms_optim.__all__)
    assert "%" not in page[0]


@pytest.mark.parametrize("cls", ms_optim.OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_signatures_show_every_keyword_with_its_default(cls):
    shown, _ = conf.constructor_signature(None, "class", cls.__name__, cls, None, None, None)
    assert "**" not in shown
    assert set(re.findall(r"(\w+)=", shown)) >= set(cls.keywords()) - set(cls.required) - {"learning_rate"}
    for name in ("loss_scale=1.0", "state_dtype='float32'", "master_weights=True"):
        assert name in shown


def test_copy_buttons_leave_prompts_out():
    prompt = re.compile(conf.copybutton_prompt_text)
    lines = ["... for k in range(2):", "$ python -m ms_optim doctor", ">>> import ms_optim", "True"]
    assert [prompt.sub("", line, count=1) for line in lines if prompt.match(line)] == [
        "for k in range(2):",
        "python -m ms_optim doctor",
        "import ms_optim",
    ]
    assert conf.copybutton_prompt_is_regexp


@every_page
def test_pages_load_nothing_from_the_network(page):
    assert not re.search(r"!\[[^]]*\]\(\w+:|<(?:img|script|link|iframe)\b", TEXTS[page])


@pytest.mark.parametrize(
    "scenario, mode", [("grouped", "graph"), ("clip", "pynative"), ("bfloat16", "pynative")], indirect=["mode"]
)
def test_own_optimizer_follows_its_reference(scenario, mode):
    shapes = ("scalar", "zero", "tiles+1", "convolution")
    pair = Pair(OWN, dataclasses.replace(SCENARIOS[scenario], shapes=shapes))
    pair.run(mode, 12)
    pair.check()


def test_own_optimizer_has_what_the_base_gives():
    optimizer = OWN.optimizer([Parameter(tensor([1.0, 2.0], "float32"), name="w")], 0.1, skip_nonfinite=True)
    optimizer((tensor([1.0, float("nan")], "float32"),))
    assert int(optimizer.skipped_steps.asnumpy()[0]) == 1
    assert optimizer.parameters[0].asnumpy().tolist() == [1.0, 2.0]
    with pytest.raises(TypeError, match="'beta3'"):
        OWN.optimizer([Parameter(tensor([1.0], "float32"), name="w")], beta3=0.5)
