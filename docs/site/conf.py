"""Sphinx's configuration. `build.py` calls Sphinx; `coursesite/` says how the pages are made."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent
OWNER = tomllib.loads((HERE / "owner.toml").read_text(encoding="utf-8"))
sys.path.insert(0, str(HERE))

project = "minidist"
author = "the authors of minidist"
language = "en"
extensions = ["myst_nb", "coursesite.extension"]
root_doc = "index"

nb_execution_mode = "off"  # notebooks are shown as they were committed
nb_merge_streams = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
myst_url_schemes = ["http", "https", "mailto", "root"]
highlight_language = "none"
suppress_warnings = ["myst.header"]  # a notebook may begin a part at any level

html_theme = "furo"
html_title = "minidist"
html_favicon = "static/favicon.svg"
templates_path = [str(HERE / "templates")]
html_static_path = [str(HERE / "static")]
html_css_files = ["site.css"]
html_js_files = [("paths.js", {"defer": "defer"})]
html_copy_source = False
html_show_copyright = False
html_show_sourcelink = False
html_show_search_summary = (
    False  # it would fetch pages, which a browser refuses to do from a folder
)
html_theme_options = {"navigation_with_keys": False}
html_baseurl = OWNER["site"]
if OWNER["repository"]:
    link = {"name": "source", "url": OWNER["repository"], "html": "source", "class": ""}
    html_theme_options["footer_icons"] = [link]
