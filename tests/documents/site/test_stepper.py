"""The stepper: recordings are what the kernels do and compute, and the page shows them."""

import functools
import http.server
import importlib
import json
import threading

import pytest
import torch

from flash_versions.dispatch.request import make_request
from flash_versions.versions.oracle.budget import assess_request
from lessons.stepper import __main__ as command
from lessons.stepper import hopper
from tests.documents.site.test_docs import browser  # noqa: F401
from tests.helpers import ROOT

PAGE = ROOT / "docs" / "extra" / "stepper" / "index.html"
pytestmark = pytest.mark.xdist_group("stepper")


@functools.cache
def recorded(name):
    """A call of the site, recorded now."""
    return command.record(command.CALLS[name])


def request_of(name):
    call = command.CALLS[name]
    return make_request(*command.inputs(call), causal=call.causal)


# Recordings


@pytest.mark.parametrize("name", command.CALLS)
def test_results_are_right(name):
    """Those that are recorded, by the fp64 oracle; and the rows of O that the steps show."""
    found, request = recorded(name), request_of(name)
    results = {"o": found["o"][None, :, None], "lse": found["lse"][None, None]}
    for what, accuracy in assess_request(results, request).items():
        assert accuracy.ok, f"{what}: {accuracy}"
    call, shown = command.CALLS[name], {}
    for step in found["steps"]:
        if "o" in step["set"]:
            first = step["query"] if "query" in step else step["tile"] * call.block_q
            first = step["tile"] if step["what"] == "combine" else first
            shown[first] = torch.from_numpy(step["set"]["o"])
    rows = torch.cat([shown[x] for x in sorted(shown)])
    o = found["o"].float()
    if found["hopper"]:
        o = torch.from_numpy(hopper.mean(o.numpy()))
    torch.testing.assert_close(rows, o, rtol=0, atol=1e-6)


def visited(call, rows):
    """(tile, number of KV blocks that it sees) of a causal call."""
    ends = {x: x + rows + call.keys - call.queries for x in range(0, call.queries, rows)}
    return [(first, -(-end // call.block_kv)) for first, end in ends.items()]


@pytest.mark.parametrize("name", command.KERNELS)
def test_bytes_are_those_of_the_schedule(name):
    """Counted by hand: Q once, K and V for each block that a tile sees, O and its statistics."""
    call, last = command.CALLS[name], recorded(name)["steps"][-1]
    row, length = 2 * call.head_dim, call.queries
    rows = 128 if "hopper" in name else call.block_q
    tiles, splits = visited(call, rows), 2 if name == "fa2-split" else 1
    blocks = sum(number for _, number in tiles)
    read = splits * length * row + 2 * blocks * call.block_kv * row
    written = length * (row + 4)
    if splits == 2:  # o and LSE in fp32, written by the splits and read by the combination
        partial = splits * length * (4 * call.head_dim + 4)
        read, written = read + partial, written + partial
    assert (last["read"], last["written"]) == (read, written)


def close(one, other):
    """Whether JSON values are the same, numbers up to the rounding of another machine."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(close(one[x], other[x]) for x in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(close, one, other))
    if isinstance(one, float) or isinstance(other, float):
        return one is not None and other is not None and one == pytest.approx(other, 5e-3, 1e-2)
    return one == other


@pytest.mark.parametrize("name", command.CALLS)
def test_committed_recordings_are_of_todays_kernels(name):
    """Else: python -m lessons.stepper, in notebooks/."""
    path = command.FOLDER / f"{name}.js"
    assert path.stat().st_size < command.MAX_BYTES
    assert close(command.read(path), json.loads(json.dumps(command.pack(recorded(name)))))


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["mine", "--kernel", "fa9"], "kernel='fa9' is unknown"),
        (["mine", "--block-q", "12"], "block_q=12 is not possible"),
        (["fa2", "--queries", "16"], "fa2 is a recording of the site"),
        (["mine", "--kernel", "fa3-hopper", "--queries", "100"], "use a multiple of 128"),
    ],
)
def test_wrong_calls_are_one_sentence(arguments, sentence, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    assert command.main(arguments) == 2
    assert sentence in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_your_own_call(tmp_path, monkeypatch):
    """Lengths that no block divides, without a mask."""
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "ROOT", tmp_path)
    given = ["--kernel", "fa2", "--queries", "12", "--keys", "20", "--full"]
    assert command.main(["mine", *given]) == 0
    found = command.read(tmp_path / "mine.js")
    q, k, v = command.inputs(command.Call("fa2", queries=12, keys=20))
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, k, v))
    )[0, 0]
    torch.testing.assert_close(torch.tensor(found["o"]).double(), expected, rtol=0.02, atol=0.02)


# The page


def step_of(driver):
    return [int(x) for x in driver.execute_script(
        "return [...document.querySelectorAll('.panel')].map(x => x.dataset.step)"
    )]  # fmt: skip


def open_page(driver, address, fragment=""):
    """Open the page and wait for its panels."""
    driver.get("about:blank")
    driver.get(f"{address}{fragment}")
    wait_for(driver, "return document.querySelectorAll('.panel[data-step]').length > 0")


def wait_for(driver, condition):
    wait = importlib.import_module("selenium.webdriver.support.ui").WebDriverWait
    wait(driver, 10).until(lambda x: x.execute_script(condition))


def press(driver, key, times=1):
    keys = importlib.import_module("selenium.webdriver.common.keys").Keys
    for _ in range(times):
        driver.find_element("tag name", "body").send_keys(getattr(keys, key))


@pytest.fixture
def addresses():
    """The page as a file, and from a server of files."""
    folder = str(PAGE.parent)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=folder)
    handler.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield PAGE.as_uri(), f"http://127.0.0.1:{server.server_port}/index.html"
        server.shutdown()


@pytest.mark.slow
def test_a_reader_steps(browser, addresses):  # noqa: F811
    """From a file and from a server: keys, buttons, another version, no complaint."""
    for address in addresses:
        open_page(browser, address)
        browser.get_log("browser")
        press(browser, "ARROW_RIGHT", 20)
        assert step_of(browser) == [21]
        assert "step 21 of 114" in browser.find_element("id", "count").text
        now = browser.find_element("css selector", "pre .now").text.strip()
        assert now == browser.find_element("css selector", ".line").text
        press(browser, "ARROW_LEFT")
        assert step_of(browser) == [20]
        press(browser, "END")
        assert step_of(browser) == [len(recorded("fa1")["steps"])]
        press(browser, "HOME")
        assert step_of(browser) == [1]
        press(browser, "SPACE")
        wait_for(browser, "return document.querySelector('.panel').dataset.step > 2")
        press(browser, "SPACE")
        browser.find_element("css selector", "button[value=fa3-hopper]").click()
        wait_for(browser, "return document.querySelector('.panel').dataset.version == 'fa3-hopper'")
        browser.find_element("id", "forward").click()
        assert step_of(browser) == [2]
        assert browser.current_url.endswith("#version=fa3-hopper&step=2")
        assert [x for x in browser.get_log("browser") if x["level"] == "SEVERE"] == []


@pytest.mark.slow
def test_links_name_a_moment(browser):  # noqa: F811
    open_page(browser, PAGE.as_uri(), "#version=fa2&step=7")
    assert step_of(browser) == [7]
    assert browser.find_element("css selector", ".panel").get_attribute("data-version") == "fa2"
    open_page(browser, PAGE.as_uri(), "#version=fa1&step=114&beside=fa2-split")
    assert step_of(browser) == [114, len(recorded("fa2-split")["steps"])]
    browser.execute_script("location.hash = '#version=fa2&step=100000'")
    wait_for(browser, "return document.querySelectorAll('.panel').length == 1")
    assert step_of(browser) == [len(recorded("fa2")["steps"])]
    browser.execute_script("location.hash = '#version=gone'")
    wait_for(browser, "return !!document.querySelector('.error')")
    assert 'no recording "gone"' in browser.find_element("css selector", ".error").text
