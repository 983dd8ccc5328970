"""How Sphinx turns the staged pages (build_site.py) into the site. It runs nothing and fetches nothing."""

import sys
from pathlib import Path

from sphinx.domains.python import PyObject
from sphinx.util.docfields import GroupedField, TypedField

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

project = "Continuous batching"
html_title = "Continuous batching"
language = "en"
extensions = ["myst_nb", "glossary_links", "accessibility", "link_previews"]
exclude_patterns = ["_extra"]

# Lessons: executed before Sphinx reads them, or never (exercises).
nb_execution_mode = "off"
nb_ipywidgets_js = {}  # would be fetched from a CDN
nb_merge_streams = True
nb_code_prompt_show = "Show the {type}"
nb_code_prompt_hide = "Hide the {type}"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
myst_links_external_new_tab = False

# The API (api_pages.py).
highlight_language = "text"
default_role = "code"
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
toc_object_entries = False  # otherwise every page's navigation would hold hundreds of names

html_theme = "furo"
templates_path = ["_templates"]
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = [("site.js", {"defer": "defer"})]
html_favicon = "../helpers/server/page/icon.svg"
html_show_sphinx = False
html_show_copyright = False
pygments_dark_style = "a11y-dark"  # the default underlines modules like links
html_copy_source = False
FONTS = "Inter, -apple-system, BlinkMacSystemFont, Segoe UI, Helvetica, Arial, sans-serif"
COLORS = {"font-stack": FONTS, "color-brand-primary": "#3f48b5", "color-brand-content": "#3f48b5"}
DARK = {"color-brand-primary": "#a3a9f2", "color-brand-content": "#a3a9f2"}
html_theme_options = {"top_of_page_buttons": [], "light_css_variables": COLORS, "dark_css_variables": DARK}

# Types are in the signatures. A typed field would take "a" for the type of "b" where a docstring describes "a, b".
PyObject.doc_field_types = [
    GroupedField(field.name, names=field.names, label=field.label, can_collapse=True)
    if isinstance(field, TypedField)
    else field
    for field in PyObject.doc_field_types
]
