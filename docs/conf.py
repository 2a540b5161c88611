"""The site: `make docs` builds it into build/docs, every warning an error.

Pages are Markdown; the reference comes from docstrings; tables of results are included
from benchmarks/results. The site takes nothing from a network: no fonts, no scripts.
"""

import pathlib
import re
import sys
import tomllib

import latex2mathml.converter
from docutils import nodes

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

project = "mxjax"
copyright = "the mxjax authors, Apache-2.0"
version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
release = version

extensions = [
  "myst_parser",
  "sphinx.ext.autodoc",
  "sphinx.ext.napoleon",
  "sphinx.ext.viewcode",
]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

# A block without a language is what a command printed: Sphinx would take it for Python.
highlight_language = "none"
# Two hyphens would become a dash, and an option that a reader copies would not work.
smartquotes = False

html_theme = "furo"
html_title = "mxjax"
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 80
napoleon_use_ivar = True
napoleon_use_admonition_for_examples = False
add_module_names = False


def escape_docstring(app, what, name, obj, options, lines):
  """Turns a plain docstring, with code in single backticks, into reStructuredText."""
  del app, what, name, obj, options
  parts = "\n".join(lines).split("`")
  parts[::2] = [re.sub(r"([*|]|_\b)", r"\\\1", part) for part in parts[::2]]
  lines[:] = "``".join(parts).split("\n")


def skip_named_tuple_fields(app, what, name, obj, skip, options):
  """Fields of a NamedTuple are described in the class, under Attributes."""
  del app, what, name, options
  return skip or (getattr(obj, "__doc__", None) or "").startswith("Alias for field")


def write_math(writer, node):
  """Formulas as MathML, which browsers show without a script."""
  text = node.astext()
  display = "block" if node.tagname == "math_block" else "inline"
  writer.body.append(latex2mathml.converter.convert(text, display=display))
  raise nodes.SkipNode


def setup(app):
  """Connects the functions above."""
  app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
  app.connect("autodoc-process-docstring", escape_docstring, priority=400)
  app.connect("autodoc-skip-member", skip_named_tuple_fields)
