"""The site: it builds without a warning, no link is broken, no picture is missing, no page needs a
network, and a browser has nothing to complain about.
"""

import html
import importlib
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
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("docs")]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site as `make docs` builds it, from scratch."""
    for module in ("sphinx", "myst_nb", "furo"):
        pytest.importorskip(module, reason=f"{module} is not installed; pip install -e '.[docs]'")
    out = tmp_path_factory.mktemp("site")
    command = ["-m", "sphinx", "-E", "-W", "--keep-going", "-q", "-d", out / "doctrees"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
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


def test_options_keep_their_dashes(site):
    """Also in a docstring, where they are no code."""
    assert [x for x in pages(site) if re.search("[–—](show|plain)", (site / x).read_text())] == []


def test_times_are_those_that_notebooks_say(site):
    """On the first page of the walkthroughs, and their sum in the README."""
    times = []
    for path in sorted((ROOT / "notebooks").glob("0*.ipynb")):
        times.append(walkthroughs.minutes(nbformat.read(path, as_version=4)))
    page = (site / "learn/walkthroughs/index.html").read_text()
    assert all(f"About {x} minutes." in page for x in times)
    assert f"about {round(sum(times) / 60)} hours" in (ROOT / "README.md").read_text()
    written = sum(x.minutes for x in walkthroughs.WRITE.values())
    assert f"about {round(written / 60)} hours more" in (ROOT / "README.md").read_text()


def test_no_link_is_broken(site):
    assert broken(site) == []


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
        assert f"python -m flash_versions.diff {list(VERSIONS)[before]} {name}" in plain


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


@pytest.mark.parametrize("name", VERSIONS)
@pytest.mark.parametrize("asked", ["{}", "FlashAttention {}"])
def test_a_search_finds_the_page_of_a_version_first(site, browser, name, asked):
    query = asked.format(name if asked == "{}" else name.removeprefix("fa")).replace(" ", "+")
    browser.get(f"{(site / 'search.html').as_uri()}?q={query}")
    waiting = importlib.import_module("selenium.webdriver.support.wait").WebDriverWait(browser, 20)
    first = waiting.until(lambda x: x.find_elements("css selector", "#search-results li a"))[0]
    assert first.get_attribute("href").partition("?")[0].endswith(f"/versions/{name}.html")
