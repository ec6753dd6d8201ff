"""The documentation site: `make docs`, or `sphinx-build docs docs/_build/html`.

Pages are Markdown. What can be computed is not written by hand: extensions/ makes the pages of the
versions, the table of what runs where and the walkthroughs' list before Sphinx reads the sources.
Nothing is loaded from the network, neither by the build nor by a reader's browser.
"""

import sys
from pathlib import Path

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS.parent), str(DOCS / "extensions")]

import flash_versions  # noqa: E402

project = "flash-versions"
release = version = flash_versions.__version__
extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.linkcode",
    "myst_nb",
    "docstrings",
    "mathml",
    "repository",
    "glossary",
    "generated_pages",
]
exclude_patterns = [
    "_build",
    "_made",
    "jupyter_execute",
    "extensions",
    "use/examples",
    "results",
    "report",
    "extra",
]
html_extra_path = ["extra"]

html_theme = "furo"
html_title = "flash-versions"
html_static_path = ["extensions/static"]
html_css_files = ["site.css"]
html_search_scorer = str(DOCS / "extensions" / "search_scorer.js")
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_theme_options = {"top_of_page_buttons": []}

smartquotes_action = "qe"  # a docstring's "--show" is no dash

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 3
html_math_renderer = "mathml"

# The walkthroughs are shown as they were committed; their own tests execute them.
nb_execution_mode = "off"
nb_merge_streams = True
nb_render_markdown_format = "myst"  # outputs have tables and formulas, too
# Set-up carries the tag "hide-cell", the code of a drawing "hide-input".
nb_code_prompt_show = "Show the code"
nb_code_prompt_hide = "Hide the code"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
napoleon_use_ivar = True
default_role = "code"  # what a docstring has between single backticks
toc_object_entries = False
