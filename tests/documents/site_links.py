"""Follow every link of a folder of HTML pages: what leads nowhere, and what needs a network."""

from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Where a tag names another file; of these, only a link may lead out of the site.
ADDRESSES = {
    "a": "href", "link": "href", "script": "src", "img": "src", "iframe": "src", "source": "src",
    "video": "src", "audio": "src", "object": "data", "embed": "src"
}  # fmt: skip
NEVER_LOADED = {"next", "prev", "index", "search", "canonical"}  # <link rel=...>


class Page(HTMLParser):
    """The addresses that a page names, (tag, address), and those that it offers: its ids."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.ids = [], set()
        self.feed(text)

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
    pages = {path.resolve(): Page(path.read_text()) for path in Path(site).rglob("*.html")}
    found = []
    for path, page in sorted(pages.items()):
        here = path.relative_to(Path(site).resolve())
        for tag, address in page.addresses:
            if reason := wrong(path, tag, address, pages):
                found.append(f"{here}: <{tag}> {address[:120]!r} {reason}")
    return found


def wrong(path, tag, address, pages):
    """What is wrong with an address on a page, or None."""
    parts = urlsplit(address)
    if parts.scheme == "data":
        return None
    if parts.scheme or parts.netloc:
        known = parts.scheme in ("http", "https", "mailto")
        return None if tag == "a" and known else "needs a network, or nothing knows it"
    target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
    if not address or not target.is_file():
        return "does not exist"
    if parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].ids:
        return "has no such place"
    return None
