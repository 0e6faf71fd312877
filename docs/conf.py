"""The documentation as a site: `make docs` builds it with Sphinx, MyST and the theme furo into build/docs.

The source folder is the repository itself, so that a link between two texts is the same here and where the files are
read as they are. Why these programs: docs/decisions/038-docs-as-a-site.md.
"""

project = "deepep-bootstrap"
author = "the deepep-bootstrap authors"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/decisions/*.md"]
exclude_patterns = [".*", "build", "deepep_bootstrap", "env", "hosts", "recipes", "tests"]

# Every heading down to the fourth level may be linked to; a link to one that is not there is a warning, and `make docs`
# takes warnings for errors.
myst_heading_anchors = 4
nitpicky = True
# JSON and TOML of the examples may have `…` in them; a block that no lexer can read is shown as it is.
suppress_warnings = ["misc.highlighting_failure"]

html_theme = "furo"
html_title = "deepep-bootstrap"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
