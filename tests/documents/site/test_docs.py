"""The site: it builds without a warning, no link is broken, no picture is missing, no page needs a
network, and a browser has nothing to complain about.
"""

import html
import importlib
import math
import os
import re
import shutil
import subprocess
import sys
from types import ModuleType

import pytest

import flash_versions
from flash_versions import VERSIONS
from tests.documents.site.site_links import broken
from tests.helpers import ROOT

DOCS = ROOT / "docs"
WALKTHROUGHS = "learn/walkthroughs"  # made before a build, as learn/versions is
nbformat = pytest.importorskip("nbformat")
sys.path.append(str(DOCS / "extensions"))
walkthroughs = importlib.import_module("walkthroughs")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
# Nothing but the site's own files: no update, no proxy, no name is resolved.
QUIET = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-quic",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1", "--window-size=1300,900",
]  # fmt: skip
# One worker builds the site, for all tests of this file.
pytestmark = pytest.mark.xdist_group("docs")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, from scratch."""
    for module in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(module, reason=f"{module} is not installed; pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = ["-m", "sphinx", "-E", "-W", "--keep-going", "-q", "-d", out / "doctrees"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, *command, DOCS, out / "html"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return out / "html"


def pages(site):
    """Addresses of all pages but those that show a file of the repository, of which there are
    many: two of them."""
    found = sorted(path.relative_to(site).as_posix() for path in site.rglob("*.html"))
    sources = [name for name in found if name.startswith("_source/")]
    return [name for name in found if name not in sources] + sources[:: max(1, len(sources) // 2)]


def test_no_link_is_broken(site):
    assert broken(site) == []


def test_every_document_and_notebook_has_its_page(site):
    documents = [path.relative_to(DOCS).with_suffix("") for path in DOCS.glob("[a-z]*/*.md")]
    notebooks = [path.stem for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")]
    assert len(documents) > 20
    for name in (*documents, *(f"{WALKTHROUGHS}/{x}" for x in (*notebooks, "index"))):
        assert (site / f"{name}.html").exists(), name


def test_every_walkthrough_says_what_it_takes(site):
    """Its time, what it needs and what it teaches; set-up and drawings are folded."""
    text = (site / WALKTHROUGHS / "index.html").read_text()
    names = [path.stem for path in sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))]
    places = [text.index(f'href="{name}.html"') for name in names]
    assert places == sorted(places)
    assert text.count("minutes.</strong>") == text.count("What you need:") == len(names)
    for name in names:
        notebook = nbformat.read(ROOT / f"notebooks/{name}.ipynb", as_version=4)
        tags = [set(cell.metadata.get("tags", ())) for cell in notebook.cells]
        folded = [x for x in tags if x & {"hide-cell", "hide-input"}]
        page = (site / WALKTHROUGHS / f"{name}.html").read_text()
        assert page.count(">Show the code<") == len(folded), name


def test_time_counts_words_code_and_exercises():
    """Not folded cells; rounded up to 5 minutes."""
    cell = nbformat.v4.new_code_cell
    lines = "\n".join(["x = 1"] * walkthroughs.LINES)
    cells = [nbformat.v4.new_markdown_cell("word " * (4 * walkthroughs.WORDS)), cell(lines)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    assert walkthroughs.minutes(notebook) == 5
    notebook.cells.append(cell(lines, metadata={"tags": ["hide-cell"]}))
    assert walkthroughs.minutes(notebook) == 5
    notebook.cells.append(cell('check("name", function)'))
    assert walkthroughs.minutes(notebook) == 5 * math.ceil((5 + walkthroughs.EXERCISE) / 5)


@pytest.mark.parametrize("name", VERSIONS)
def test_every_version_is_told(site, name):
    """On a page of its own, with its idea and all its files; and on those about all versions."""
    text = (site / f"learn/versions/{name}.html").read_text()
    plain = html.unescape(re.sub("<[^>]*>", "", text))  # without the glossary's links
    assert VERSIONS[name].title in plain and VERSIONS[name].idea[1:] in plain
    for path in (ROOT / "flash_versions/versions" / name).rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        assert path.name == "__init__.py" or f"{file}.html" in text, file
    for page in ("index", "use/where", "learn/versions/index"):
        assert VERSIONS[name].title in (site / f"{page}.html").read_text(), page
    before = list(VERSIONS).index(name) - 1
    if before >= 0:
        lines = (site / f"diffs/{list(VERSIONS)[before]}-{name}.html").read_text()
        assert 'class="add"' in lines and f"{name}/forward.py" in lines


def test_terms_show_their_definition(site):
    """On pages and in notebooks, the first use only."""
    there = ("understand/numerics", "../learn/glossary"), (f"{WALKTHROUGHS}/01_fa1", "../glossary")
    for page, to in there:
        text = (site / f"{page}.html").read_text()
        for term in ("tensor-core", "program"):
            found = re.findall(rf'<a class="term [^>]+ href="{to}.html#{term}" title="(.*?)"', text)
            assert len(found) == 1 and len(found[0]) > 20, (page, term)
    assert 'class="term ' not in (site / "learn/glossary.html").read_text()


def test_tables_of_outputs_are_tables(site):
    for page in ("00_start", "01_fa1", "02_fa2"):
        text = (site / WALKTHROUGHS / f"{page}.html").read_text()
        assert "<td" in text and "|--" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)


def test_every_public_name_is_documented(site):
    reference = "".join(path.read_text() for path in (site / "use/api").glob("*.html"))
    for name in flash_versions.__all__:
        public = getattr(flash_versions, name)
        anchor = f"flash_versions.{name}"
        if isinstance(public, ModuleType):
            anchor = f"module-{public.__name__}"
        assert f'id="{anchor}"' in reference, name
    for name in ("flash_attn.flash_attn_func", "integrations.hf.register"):
        assert f'id="flash_versions.{name}"' in reference, name
    for name in (
        "generation.engine.generate",
        "generation.sampling.sample",
        "rl.loss.grpo_loss",
        "rl.trainer.Trainer",
    ):
        assert f'id="transformer.{name}"' in reference, name


def test_where_it_runs_is_what_the_package_says(site):
    """A few facts that the tables must show, however they come about."""
    text = (site / "use/where.html").read_text()
    assert "capability 7.5; 8.0 (Ampere) or later works" in text  # of a T4
    row = text[text.index("H100, H200") :]
    assert row.index("explicit (Gluon)") < row.index("B200")
    for arch in ("A100", "4090", "B200", "no GPU"):
        assert arch in text


def test_links_that_are_wrong_are_found(tmp_path):
    """The checker itself, on a site with one fault of every kind."""
    (tmp_path / "other.html").write_text("<p id='here'>")
    (tmp_path / "good.png").write_bytes(b"")
    (tmp_path / "index.html").write_text(
        "<a href='other.html#here'><a href='https://example.org/x'><img src='good.png'>"
        "<img src='data:image/png;base64,AAAA'><a href='#top' id='top'>"
        "<a href='other.html#gone'><a href='gone.html'><img src='gone.png'>"
        "<script src='https://example.org/x.js'></script><a href='repository:x.py'>"
        "<link rel='stylesheet' href='https://example.org/x.css'><img>"
    )
    found = broken(tmp_path)
    assert len(found) == 7
    for fault in ("#gone", "gone.html", "gone.png", "x.js", "x.css", "repository:x.py", "<img> ''"):
        assert any(fault in sentence for sentence in found), fault


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a window and without a network."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    if BROWSER is None or DRIVER is None:
        pytest.skip("there is no chromium with its chromedriver on this machine")
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for argument in (*QUIET, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


NO_PICTURE = """return [...document.images].filter(x => !x.complete || x.naturalWidth == 0)
    .map(x => x.getAttribute('src').slice(0, 100))"""
FLAT_FORMULAS = """return [...document.querySelectorAll('math')]
    .filter(x => x.checkVisibility() && x.getBoundingClientRect().height < 5).length"""
IDLE_SLIDERS = """const shown = () => [...document.images].map(x => x.src).join();
    return [...document.querySelectorAll('input[type=range]')].filter(x => {
        const before = shown(); x.value = x.max;
        x.dispatchEvent(new Event('input')); x.dispatchEvent(new Event('change'));
        return shown() == before }).length"""


def complaints(browser):
    """What a browser says against the page that it shows: errors, pictures that are not there,
    formulas that are not drawn, films that stand still.
    """
    found = ["a slider that moves no picture"] * browser.execute_script(IDLE_SLIDERS)
    found += [one["message"] for one in browser.get_log("browser") if one["level"] == "SEVERE"]
    found += [f"no picture: {source}" for source in browser.execute_script(NO_PICTURE)]
    found += ["a formula without height"] * browser.execute_script(FLAT_FORMULAS)
    return found


@pytest.fixture(scope="module")
def seen(site, browser):
    """(complaints, what is cut off) of every page, by its name; each is opened once."""
    found = {}
    for name in pages(site):
        browser.get((site / name).as_uri())
        beyond = cut_off(browser, WIDTHS)
        found[name] = complaints(browser), beyond
    assert len(found) > 30
    return found


def test_a_browser_shows_every_page(seen):
    assert {name: said for name, (said, _) in seen.items() if said} == {}


@pytest.mark.parametrize(
    "fault",
    [
        "<img src='gone.png'>",
        "<script>throw new Error('mistake')</script>",
        "<link rel='stylesheet' href='https://example.org/x.css'>",
        "<input type=range max=3 oninput='gone()'>",
        "<input type=range max=3>",
    ],
)
def test_a_browser_complains(fault, browser, tmp_path):
    path = tmp_path / "page.html"
    path.write_text(f"<!doctype html><p>Text</p>{fault}")
    browser.get(path.as_uri())
    assert complaints(browser)


WIDTHS = (1920, 1600, 1400, 1280, 390)  # of a large screen, of laptops, of a phone
# What is wider than its place, or further right than the window, and cannot be scrolled to.
CUT_OFF = """
    const width = document.documentElement.clientWidth, found = []
    const style = x => getComputedStyle(x)
    const scrolls = x => x && x != document.body && x != document.documentElement
        && (['auto', 'scroll'].includes(style(x).overflowX) || scrolls(x.parentElement))
    const drawn = x => x.checkVisibility({visibilityProperty: true}) && x.clientWidth > 1
    if (document.documentElement.scrollWidth > width + 1) found.push('the page is too wide')
    for (const x of document.querySelectorAll('article *, .toc-drawer *, .sidebar-drawer *')) {
        const wider = x.scrollWidth > x.clientWidth + 2
        const beyond = x.getBoundingClientRect().right > width + 1
        if (!(wider || beyond) || !drawn(x)) continue  // of thousands of elements nearly all
        const drawer = x.closest('.toc-drawer, .sidebar-drawer')
        if (drawer && style(drawer).position == 'fixed') continue
        const name = x.tagName + ' ' + x.className + ': ' + x.textContent.trim().slice(0, 40)
        const hidden = ['hidden', 'clip'].includes(style(x).overflowX)
        if (hidden && wider) found.push('cut off: ' + name)
        if (beyond && !scrolls(x.parentElement)) found.push('beyond the edge: ' + name)
    }
    return found.slice(0, 5)"""


def cut_off(browser, widths):
    """What of the page that a browser shows cannot be seen in windows of these widths."""
    found = []
    try:
        for width in widths:
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            found += [f"{width}: {said}" for said in browser.execute_script(CUT_OFF)]
    finally:
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    return found


def test_nothing_is_cut_off(seen):
    assert {name: beyond for name, (_, beyond) in seen.items() if beyond} == {}


@pytest.mark.parametrize(
    "fault",
    [
        "<p style='width: 500px'>wide",
        "<p style='overflow: hidden; white-space: nowrap; width: 50px'>a sentence that is long",
        "<p style='position: absolute; left: 380px; width: 100px'>outside",
    ],
)
def test_what_is_cut_off_is_found(browser, tmp_path, fault):
    path = tmp_path / "page.html"
    begin = "<!doctype html><article><div style='overflow: auto'><pre>scrolls " + "x" * 200
    path.write_text(f"{begin}</pre></div>")
    browser.get(path.as_uri())
    assert cut_off(browser, [390]) == []
    path.write_text(f"{begin}</pre></div>{fault}</article>")
    browser.get(path.as_uri())
    assert cut_off(browser, [390])


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("asked", ["{}", "FlashAttention {}"])
def test_a_search_finds_the_page_of_a_version_first(site, browser, name, asked):
    query = asked.format(name if asked == "{}" else name.removeprefix("fa")).replace(" ", "+")
    browser.get(f"{(site / 'search.html').as_uri()}?q={query}")
    waiting = importlib.import_module("selenium.webdriver.support.wait").WebDriverWait(browser, 20)
    first = waiting.until(lambda x: x.find_elements("css selector", "#search-results li a"))[0]
    assert first.get_attribute("href").partition("?")[0].endswith(f"/versions/{name}.html")
