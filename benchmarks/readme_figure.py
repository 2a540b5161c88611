"""The figure of the README: KL against all stored bytes, and these bytes by model size.

  python benchmarks/readme_figure.py

Reads results/stored_bytes.json and writes docs/images/kl_against_bytes.svg, whose
colors follow the reader's light or dark scheme. On the left is what was measured, on
SmolLM2-135M-Instruct: rings are methods that also learn from predictions, and gray
points quantize weights alone. On the right are bytes alone.
"""

import json
import math
import pathlib
import re

HERE = pathlib.Path(__file__).parent
FIGURE = HERE.parent / "docs" / "images" / "kl_against_bytes.svg"
WIDTH, HEIGHT, TOP, BOTTOM = 800, 420, 98, 56
LEFT_PANEL, RIGHT_PANEL = (60, 360), (460, 620)
BYTES, KLS = (90, 170), (0.15, 1.8)
SHARES = (0.3, 0.7)
LABELS = {
  "wush:weighting=fisher+tune": "wush, tuned",
  "hires:storage=bfloat16": "hires, bfloat16",
  "gptq:activations=float": "gptq, W4A16",
  "hires:activations=float": "hires, W4A16",
}
LINES = {
  "rtn": "rtn, gptq, brq",
  "wush": "wush",
  "hires-rotated": "hires-next, hires-rotated",
  "hires": None,
}
"""Methods of the right panel, with the label if it is another than the name."""
OURS = ("hires", "hires-next", "hires-rotated", "hires:storage=bfloat16")
LEARNED = ("wush:weighting=fisher+tune", "hires-next", "hires-rotated")
"""Methods with a backward pass through the model, shown as rings."""
LEGEND = (
  "rings: also learned from predictions, a longer build; gray: weights alone, W4A16"
)
# By how many pixels labels move down, where they would lie on each other.
NUDGES = {"rtn": 21, "wush": 8, "hires-rotated": -5, "hires": -17}
LEFT_NUDGES = {
  "hires:storage=bfloat16": -13,
  "gptq:activations=float": -8,
  "hires-next": -3,
  "hires-rotated": 3,
}
ON_THE_LEFT = ("gptq:activations=float",)
"""Labels of the left panel that stand before their point, where brq's is behind it."""
STYLE = """
  text { font: 13px system-ui, sans-serif }
  .title { font-size: 15px; font-weight: 600 }
  .page { fill: #ffffff } .line { stroke: #d1d9e0; fill: none }
  .text { fill: #1f2328 } .quiet { fill: #59636e } .ours { fill: #0969da }
  .ring { fill: none; stroke-width: 2.5 } .ring-text { stroke: #1f2328 }
  .ring-ours { stroke: #0969da }
  .path-text { stroke: #1f2328; fill: none } .path-ours { stroke: #0969da; fill: none }
  @media (prefers-color-scheme: dark) {
    .page { fill: #0d1117 } .line { stroke: #3d444d }
    .text { fill: #f0f6fc } .quiet { fill: #9198a1 } .ours { fill: #4493f8 }
    .path-text { stroke: #f0f6fc } .path-ours { stroke: #4493f8 }
    .ring-text { stroke: #f0f6fc } .ring-ours { stroke: #4493f8 }
  }
"""


def text(kind, x, y, words, anchor="start"):
  return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{words}</text>'


def across(panel, share):
  return round(panel[0] + share * (panel[1] - panel[0]), 1)


def up(share):
  return round(HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM), 1)


def kl_height(kl):
  """KL stands on a logarithmic axis."""
  return up(math.log(kl / KLS[0]) / math.log(KLS[1] / KLS[0]))


def share_height(share):
  return up((share - SHARES[0]) / (SHARES[1] - SHARES[0]))


def grid_line(panel, y, words):
  line = f'<line class="line" x1="{panel[0]}" x2="{panel[1]}" y1="{y}" y2="{y}"/>'
  return line + text("quiet", panel[0] - 8, y + 4, words, "end")


def kind_of(method):
  return "ours" if method in OURS else "text"


def measured(result):
  """The left panel: every method whose KL was measured."""
  model, parts = next(iter(result["sizes"].items()))
  yield text("quiet", LEFT_PANEL[0], TOP - 18, f"{model}: KL, nats a token")
  for kl in (0.15, 0.2, 0.3, 0.5, 0.8, 1.2, 1.8):
    yield grid_line(LEFT_PANEL, kl_height(kl), f"{kl:g}")
  place = lambda size: across(LEFT_PANEL, (size - BYTES[0]) / (BYTES[1] - BYTES[0]))
  for size in range(BYTES[0], BYTES[1], 20):
    yield text("quiet", place(size), HEIGHT - BOTTOM + 20, size, "middle")
  whole = next(iter(parts.values()))["bf16"] / 1e6
  told = f"all stored bytes, MB (BF16: {whole:.0f})"
  yield text("quiet", across(LEFT_PANEL, 0.5), HEIGHT - 14, told, "middle")
  for method, kl in result["measured"].items():
    x, y = place(parts[method]["total"] / 1e6), kl_height(kl)
    kind = kind_of(method) if parts[method]["form"] == "W4A4" else "quiet"
    is_ring = method in LEARNED
    look = f"ring ring-{kind}" if is_ring else kind
    yield f'<circle class="{look}" cx="{x}" cy="{y}" r="{4 if is_ring else 4.5}"/>'
    place_of = (x - 9, "end") if method in ON_THE_LEFT else (x + 9, "start")
    height = round(y + 4 + LEFT_NUDGES.get(method, 0), 1)
    words = LABELS.get(method, method)
    yield text(kind, round(place_of[0], 1), height, words, place_of[1])


def by_size(result):
  """The right panel: the share of BF16's bytes that methods store, by model."""
  sizes = result["sizes"]
  yield text("quiet", RIGHT_PANEL[0], TOP - 18, "all stored bytes, of BF16's")
  for share in (0.3, 0.4, 0.5, 0.6, 0.7):
    yield grid_line(RIGHT_PANEL, share_height(share), f"{share:g}")
  places = [across(RIGHT_PANEL, i / (len(sizes) - 1)) for i in range(len(sizes))]
  for x, model in zip(places, sizes, strict=True):
    [size] = re.findall(r"-(\d+[MB])", model)
    yield text("quiet", x, HEIGHT - BOTTOM + 20, size, "middle")
  yield text("quiet", across(RIGHT_PANEL, 0.5), HEIGHT - 14, "parameters", "middle")
  for method, label in LINES.items():
    of = [parts[method] for parts in sizes.values()]
    heights = [share_height(one["total"] / one["bf16"]) for one in of]
    points = " ".join(f"{x},{y}" for x, y in zip(places, heights, strict=True))
    kind = kind_of(method)
    yield f'<polyline class="path-{kind}" points="{points}"/>'
    for x, y in zip(places, heights, strict=True):
      yield f'<circle class="{kind}" cx="{x}" cy="{y}" r="3.5"/>'
    y = round(heights[-1] + 4 + NUDGES[method], 1)
    yield text(kind, places[-1] + 9, y, label or method)


def draw():
  """The text of the file."""
  result = json.loads((HERE / "results" / "stored_bytes.json").read_text())
  space = "http://www.w3.org/2000/svg"
  title = "Divergence from the float model, and what it takes to store"
  lines = [
    f'<svg xmlns="{space}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
    f"<title>{title}</title><style>{STYLE}</style>",
    f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="6"/>',
    text("text title", 20, 28, title),
    text("quiet", 20, 52, LEGEND),
    *measured(result),
    *by_size(result),
    "</svg>",
  ]
  return "\n".join(lines) + "\n"


if __name__ == "__main__":
  FIGURE.parent.mkdir(exist_ok=True)
  FIGURE.write_text(draw())
