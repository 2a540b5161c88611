"""Puts the tables of benchmarks/results/*.md into the documents that show them.

  python benchmarks/fill_docs.py

A document says where: everything between `<!-- results/NAME.md -->` and `<!-- end -->`
is replaced. tests/test_docs.py fails where a document shows an old table.
"""

import pathlib
import re

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PLACE = re.compile(r"(<!-- results/(\w+\.md) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def filled(text):
  """A document with the tables as the result files have them."""

  def table(place):
    start, name, _, end = place.groups()
    return f"{start}\n{(RESULTS / name).read_text().strip()}\n\n{end}"

  return PLACE.sub(table, text)


def main():
  for file in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
    file.write_text(filled(file.read_text()))


if __name__ == "__main__":
  main()
