"""Follow every link of a folder of HTML pages: what leads nowhere, and what needs a network."""

import os.path
import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Where a tag names another file; of these, only a link may lead out of the site.
ADDRESSES = {
    "a": "href", "link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src",
    "video": "src", "audio": "src", "object": "data", "embed": "src"
}  # fmt: skip
# The colours of code: most tags of a site, and none names an address.
COLOURS = re.compile(r'<span class="[\w -]*">|</span>')
LINES = re.compile(r'<a id="(L-\d+)" name="\1"></a><a href="#\1"> *\d+</a>')  # of a shown file
NEVER_LOADED = {"next", "prev", "index", "search", "canonical"}  # <link rel=...>


class Page(HTMLParser):
    """The addresses that a page names, (tag, address), and those that it offers: its ids."""

    def __init__(self, text):
        super().__init__()
        text = COLOURS.sub("", text)
        self.addresses, self.ids = [], {*LINES.findall(text)}
        self.feed(LINES.sub("", text))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        address = found.get(ADDRESSES.get(tag, ""))
        if tag == "img" and not address:
            self.addresses.append(("img", ""))
        elif address:
            leads_out = tag == "link" and found.get("rel") in NEVER_LOADED
            self.addresses.append(("a" if leads_out else tag, address))


def broken(site):
    """One sentence for each address that is wrong, of all pages below a folder."""
    site = Path(site).resolve()
    pages = {str(path): Page(path.read_text()) for path in site.rglob("*.html")}
    is_file, found = cache(os.path.isfile), []
    for path, page in sorted(pages.items()):
        here = os.path.relpath(path, site)
        for tag, address in page.addresses:
            if reason := wrong(path, tag, address, pages, is_file):
                found.append(f"{here}: <{tag}> {address[:120]!r} {reason}")
    return found


def wrong(path, tag, address, pages, is_file):
    """What is wrong with an address on a page, or None."""
    parts = urlsplit(address)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        known = parts.scheme in ("http", "https", "mailto")
        return None if tag == "a" and known else "needs a network, or nothing knows it"
    target = path
    if parts.path:
        target = os.path.normpath(os.path.join(os.path.dirname(path), unquote(parts.path)))
    if not address or not is_file(target):
        return "does not exist"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return "has no such place"
    return None
