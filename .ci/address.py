"""Write the repository's public address wherever it belongs: python .ci/address.py ADDRESS.

It goes into the links of the package (pyproject.toml), the citation, the links to Colab, Kaggle and
Codespaces in docs/use/install.md, and the commands that clone. Another address replaces the one
that is there.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
GITHUB = re.compile(r"https://github\.com/([\w.-]+)/([\w.-]+?)(?:\.git)?/?")
CLONED = "README.md", "docs/index.md", "docs/extend/contributing.md"
PLACE = "<!-- address -->\n", "<!-- end -->\n"


def package_links(text: str, address: str) -> str:
    """pyproject.toml with the links that PyPI shows."""
    text = re.sub(r"\n\[project\.urls\]\n(?:.+\n)*", "", text)
    links = {
        "Repository": address,
        "Documentation": f"{address}/tree/main/docs",
        "Changelog": f"{address}/blob/main/docs/changelog.md",
        "Issues": f"{address}/issues",
    }
    lines = "".join(f'{name} = "{link}"\n' for name, link in links.items())
    before, heading, after = text.partition("\n[project.optional-dependencies]\n")
    return f"{before}\n[project.urls]\n{lines}{heading}{after}"


def citation(text: str, address: str) -> str:
    """CITATION.cff with the address."""
    text = re.sub(r"^repository-code: .*\n", "", text, flags=re.MULTILINE)
    return text.replace("license: MIT\n", f"license: MIT\nrepository-code: {address}\n")


def start_links(text: str, address: str, owner: str, name: str) -> str:
    """docs/use/install.md with links that open the first notebook elsewhere."""
    notebook = "blob/main/notebooks/00_start.ipynb"
    links = {
        "Open the first notebook in Colab": f"https://colab.research.google.com/github/{owner}/"
        f"{name}/{notebook}",
        "open it in Kaggle": f"https://kaggle.com/kernels/welcome?src={address}/{notebook}",
        "create a codespace": f"https://codespaces.new/{owner}/{name}",
    }
    line = ", ".join(f"[{what}]({link})" for what, link in links.items()) + ".\n"
    text = re.sub(r'^ADDRESS = ".*"$', f'ADDRESS = "{address}"', text, flags=re.MULTILINE)
    before, _, rest = text.partition(PLACE[0])
    return before + PLACE[0] + line + PLACE[1] + rest.partition(PLACE[1])[2]


def clone(text: str, address: str) -> str:
    """A page whose command clones from the address, without the words that ask for one."""
    text = re.sub(r" +# ADDRESS: .*", "", text)
    return re.sub(r"git clone \S+ flash-versions", f"git clone {address} flash-versions", text)


def main(arguments: list[str]) -> int:
    """Write the address; returns the exit code."""
    found = GITHUB.fullmatch(arguments[0]) if len(arguments) == 1 else None
    if found is None:
        given = " ".join(arguments) or "nothing"
        sys.stderr.write(f"error: {given} is no address; https://github.com/OWNER/NAME works\n")
        return 2
    owner, name = found.groups()
    address = f"https://github.com/{owner}/{name}"
    for file, text in {
        "pyproject.toml": package_links((ROOT / "pyproject.toml").read_text(), address),
        "CITATION.cff": citation((ROOT / "CITATION.cff").read_text(), address),
        "docs/use/install.md": start_links(
            (ROOT / "docs/use/install.md").read_text(), address, owner, name
        ),
        **{page: clone((ROOT / page).read_text(), address) for page in CLONED},
    }.items():
        (ROOT / file).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
