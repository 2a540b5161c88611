"""The figure of the README: error against stored bits a weight, all methods.

  python benchmarks/readme_figure.py

Reads results/compare_smollm2.json and writes docs/images/error_against_bits.svg, whose
colors follow the reader's light or dark scheme.
"""

import json
import math
import pathlib

HERE = pathlib.Path(__file__).parent
FIGURE = HERE.parent / "docs" / "images" / "error_against_bits.svg"
TITLE = "Operator error on SmolLM2-135M under one contract, lower is better"
WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 90, 52, 48
BITS, ERRORS = (4.0, 8.2), (0.0115, 0.0345)
NAMES = {
  "batquant:tokens=256:steps=40": "batquant",
  "spinquant:batch=1:steps=10": "spinquant",
}
LEFT_OUT = "spinquant:steps=0"
# Where labels would lie on each other: by how many pixels they move down.
NUDGES = {"rtn": -9, "focus": 4, "batquant": -3, "spinquant": 0, "gptq": 10, "brq": 9}
STYLE = """
  text { font: 13px system-ui, sans-serif }
  .title { font-size: 15px; font-weight: 600 }
  .page { fill: #ffffff } .line { stroke: #d1d9e0 }
  .text { fill: #1f2328 } .quiet { fill: #59636e } .ours { fill: #0969da }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .line { stroke: #3d444d }
    .text { fill: #f0f6fc } .quiet { fill: #9198a1 } .ours { fill: #4493f8 }
  }
"""


def points():
  """Name, stored bits a weight and operator error of every method."""
  rows = json.loads((HERE / "results" / "compare_smollm2.json").read_text())["rows"]
  for row in sorted(rows, key=lambda row: row["method"]):
    bits = row["size"]["quantized_linears"]["bits_per_weight"]
    if row["method"] != LEFT_OUT:
      yield NAMES.get(row["method"], row["method"]), bits, row["operator_error"]


def place(bits, error):
  """Pixels of a point; errors stand on a logarithmic axis."""
  across = (bits - BITS[0]) / (BITS[1] - BITS[0])
  up = math.log(error / ERRORS[0]) / math.log(ERRORS[1] / ERRORS[0])
  x = LEFT + across * (WIDTH - LEFT - RIGHT)
  return round(x, 1), round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1)


def text(kind, x, y, words, anchor="start"):
  return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def axes():
  for error in (0.012, 0.015, 0.02, 0.025, 0.03):
    _, y = place(BITS[0], error)
    line = f'<line class="line" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>'
    yield line + text("quiet", LEFT - 8, y + 4, f"{error:.4f}".rstrip("0"), "end")
  for bits in (4, 5, 6, 7, 8):
    x, _ = place(bits, ERRORS[0])
    yield text("quiet", x, HEIGHT - BOTTOM + 20, bits, "middle")
  told = "stored bits a weight, transforms and tables included"
  yield text("quiet", (LEFT + WIDTH - RIGHT) // 2, HEIGHT - 8, told, "middle")


def marks():
  for name, bits, error in points():
    x, y = place(bits, error)
    kind = "ours" if name == "hires" else "text"
    dot = f'<circle class="{kind}" cx="{x}" cy="{y}" r="4.5"/>'
    yield dot + text(kind, x + 10, round(y + 4 + NUDGES.get(name, 0), 1), name)


def draw():
  """The text of the file."""
  space = "http://www.w3.org/2000/svg"
  lines = [
    f'<svg xmlns="{space}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
    f"<title>{TITLE}</title><style>{STYLE}</style>",
    f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
    text("text title", 20, 28, TITLE),
    *axes(),
    *marks(),
    "</svg>",
  ]
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  FIGURE.parent.mkdir(exist_ok=True)
  FIGURE.write_text(draw())
