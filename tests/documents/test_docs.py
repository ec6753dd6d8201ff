"""The site: it builds without a warning, no link is broken, no picture is missing, no page needs a
network, and a browser has nothing to complain about.
"""

import os
import shutil
import subprocess
import sys

import pytest

import flash_versions
from flash_versions import VERSIONS
from tests.documents.site_links import broken
from tests.helpers import ROOT

DOCS = ROOT / "docs"
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
# Nothing but the site's own files: no update, no proxy, no name is resolved.
QUIET = [
    "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-quic",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--window-size=1300,900",
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
    documents = [path.stem for path in DOCS.glob("*.md")]
    notebooks = [f"walkthroughs/{path.stem}" for path in (ROOT / "notebooks").glob("[0-9]*.ipynb")]
    assert len(documents) > 8
    for name in (*documents, *notebooks, "walkthroughs/index"):
        assert (site / f"{name}.html").exists(), name


@pytest.mark.parametrize("name", VERSIONS)
def test_every_version_is_told(site, name):
    """On a page of its own, with its idea and all its files; and on those about all versions."""
    text = (site / f"versions/{name}.html").read_text()
    assert VERSIONS[name].title in text and VERSIONS[name].idea[1:] in text
    for path in (ROOT / "flash_versions/versions" / name).rglob("*.py"):
        file = path.relative_to(ROOT).as_posix()
        assert path.name == "__init__.py" or f"{file}.html" in text, file
    for page in ("index", "where", "versions/index"):
        assert VERSIONS[name].title in (site / f"{page}.html").read_text(), page
    before = list(VERSIONS).index(name) - 1
    if before >= 0:
        lines = (site / f"diffs/{list(VERSIONS)[before]}-{name}.html").read_text()
        assert 'class="add"' in lines and f"{name}/forward.py" in lines


def test_every_public_name_is_documented(site):
    reference = "".join(path.read_text() for path in (site / "api").glob("*.html"))
    for name in flash_versions.__all__:
        assert f'id="flash_versions.{name}"' in reference, name
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
    text = (site / "where.html").read_text()
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


def complaints(browser, address):
    """What a browser says against a page: errors, pictures that are not there, formulas that are
    not drawn, films that stand still.
    """
    browser.get(address)
    found = ["a slider that moves no picture"] * browser.execute_script(IDLE_SLIDERS)
    found += [one["message"] for one in browser.get_log("browser") if one["level"] == "SEVERE"]
    found += [f"no picture: {source}" for source in browser.execute_script(NO_PICTURE)]
    found += ["a formula without height"] * browser.execute_script(FLAT_FORMULAS)
    return found


def test_a_browser_shows_every_page(site, browser):
    found = {name: complaints(browser, (site / name).as_uri()) for name in pages(site)}
    assert len(found) > 30
    assert {name: said for name, said in found.items() if said} == {}


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
    assert complaints(browser, path.as_uri())
