import copy
import csv
import html.parser
import json
import math
import re
import shutil
import subprocess
import xml.etree.ElementTree

import pytest

from mxjax.evaluation.report import html as fragments
from mxjax.evaluation.report import numbers, svg
from mxjax.evaluation.report import page as report
from tests import refusals

VOID = {"meta", "br", "wbr", "hr", "img", "link", "input"}
PATHS = ("self_attn/q_proj", "mlp/down_proj")


class Page(html.parser.HTMLParser):
  """Checks that elements close in order, and collects text and attributes."""

  def __init__(self, source):
    super().__init__()
    self.open, self.words, self.attributes, self.tags = [], [], [], []
    self.feed(source)
    self.close()
    assert self.open == []
    self.text = " ".join(self.words)

  def handle_starttag(self, tag, attrs):
    self.handle_startendtag(tag, attrs)
    if tag not in VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += attrs

  def handle_endtag(self, tag):
    assert self.open.pop() == tag

  def handle_data(self, data):
    self.words.append(data)


def linear(layer, mapped):
  record = dict(
    shape=[64, 64],
    map="none",
    rounding="nearest",
    edit_rate=0.0,
    saturated_activations=0.02,
    top_code_weights=0.05,
    activation_exponents={"-3": 10, "-1": 4},
    weight_exponents={"-2": 7},
  )
  errors = [0.02 + 0.001 * layer] * 4
  if mapped:
    errors = [0.02, 0.01, 0.008, 0.005 + 0.001 * layer]
    record |= dict(
      map="BlockDense",
      rounding="one-code",
      edit_rate=0.9,
      balance_steps=[1.0, 0.5, 0.0, 1.0],
      interaction_spectral_norm=[0.03, 0.06],
      damping=0.1 if layer == 1 else 0.009999999776482582,
    )
  names = ("rtn", "mapped_rtn", "mapped_nearest", "final")
  return record | {f"error_{n}": e for n, e in zip(names, errors, strict=True)}


ATTENTION = {"scale": [1.01, 0.99], "offset": [1e-5, -2e-4]}
MLP = {"alpha": -0.01, "beta": 0.03, "eta": 0.02, "gate_deviation": 0.4, "cells": 4}
RECOVERY = {
  "attention": ATTENTION | {"error_before": 0.006, "error_after": 0.005},
  "mlp": MLP | {"error_before": 0.012, "error_after_linearized": 0.01},
}
SANITY = {"float_loss": 2.5, "quantized_loss": 2.75, "divergence": 0.0625}
BYTES = {"codes": 500, "scales": 60, "maps": 40, "rounding": 30, "total": 630}


def run(method="hires", layers=3, mapped=True):
  return {
    "method": method,
    "perplexity": {
      "wikitext": {"mean": 21.5, "spread": 0.25, "values": [21.25, 21.75]}
    },
    "float_perplexity": {"wikitext": 18.75},
    "operator_error": 0.0123 if mapped else None,
    "size": {
      "quantized_linears": BYTES | {"weights": 1000, "bits_per_weight": 5.04},
      **{"recovery": 20, "other": 400, "total": 1050},
      **{"bf16_total": 2400, "bf16_over_total": 2400 / 1050},
    },
    "arithmetic": {
      **{"model": "bfloat16", "maps": ["bfloat16", "float32"]},
      "recovery_rounded": {"mlp": "bfloat16"},
    },
    "record": {
      "program": {"name": method, "recover": [], "options": {"damping": 0.01}},
      "contract_hash": "c0ffee" * 10,
      "calibration": {"fingerprint": "beef" * 16, "shape": [2, 256]},
      "layers": [
        {
          "name": f"layers_{index}",
          "linears": {path: linear(index, mapped) for path in PATHS},
          "recovery": RECOVERY if mapped else {},
        }
        for index in range(layers)
      ],
      "clock": {
        "seconds": {"calibration": 1.5, "quantization": 300.0},
        "peak_bytes": {"calibration": 2**30, "quantization": 3 * 2**29},
      },
      "sanity": SANITY | {"agreement": 0.875, "tokens": 255} if mapped else None,
    },
  }


def written(runs, tmp_path, **names):
  names = {"title": "A title", "subtitle": "its line"} | names
  path = report.write_report(tmp_path / "report.html", runs, **names)
  return path.read_text(encoding="utf-8")


def losses(run, values):
  run["perplexity"]["wikitext"]["window_losses"] = values
  return run


RTN = {
  "method": "rtn",
  "perplexity": {"wikitext": {"mean": 90.5, "spread": 0.0, "values": [90.5]}},
  "operator_error": None,
  "agreement": {"kl_mean": 1.25, "flips": 0.5},
  "size": run("rtn")["size"],
  "seconds": 12.0,
}
"""What a build measures of RTN beside its own method."""
MEASURED = {"agreement": {"kl_mean": 0.1234, "flips": 0.0875}, "seconds": 300.0}


def test_seconds_have_the_unit_of_their_size():
  spans = 0, 7.13e-5, 9.996e-4, 0.0421, 0.5, 119, 600, 7200
  told = ["0 s", "71.3 µs", "1 ms", "42.1 ms", "0.5 s", "119 s", "10 min", "2 h"]
  assert [numbers.seconds(span) for span in spans] == told


def test_all_numbers_are_there(tmp_path):
  """Of the verdict, of what is unusual, and of what made the model."""
  page = Page(written([run()], tmp_path))
  numbers = {
    "perplexity": ("21.5", "± 0.125 by replicates", "18.75"),
    "operator error": ("0.0123",),
    "size": ("1.025 KiB", "0.44 times", "5.04"),
    "damping": ("more damping than usual: 0.1 in layers_1/self_attn/q_proj",),
    "provenance": ("c0ffee" * 10, "beef" * 16, "2 × 256", "bfloat16", "quantization 5"),
    "memory": ("1.5 GiB",),
  }
  missing = [
    (part, text)
    for part, texts in numbers.items()
    for text in texts
    if text not in page.text
  ]
  assert not missing
  assert page.tags.count("svg") == 2 and page.tags.count("table") == 2


def test_charts_are_as_wide_as_a_phone_and_tables_scroll(tmp_path):
  source = written([run(), run("rtn", mapped=False)], tmp_path)
  assert 'name="viewport" content="width=device-width' in source
  widths = {int(w) for w in re.findall(r'<svg viewBox="0 0 (\d+) ', source)}
  assert widths == {svg.WIDTH} and svg.WIDTH <= 390
  assert source.count("<table>") == source.count('<div class="scroll" tabindex="0">')


def test_options_are_kept_whole_and_methods_break_between_their_parts():
  told = fragments.words(
    "ask <by> --operator-error. gptq:activations=float 2,048 top-k"
  )
  assert told == (
    'ask &lt;by&gt; <span class="option">--operator-error.</span> '
    "gptq:<wbr>activations=<wbr>float 2,048 top-k"
  )
  assert fragments.words("--mesh=data=2") == (
    '<span class="option">--mesh=<wbr>data=2</span>'
  )
  [rule] = re.findall(r"^\.option \{(.*)\}$", fragments.STYLE.read_text(), re.MULTILINE)
  assert dict(part.split(":") for part in rule.replace(" ", "").split(";") if part) == {
    "display": "inline-block",
    "max-width": "100%",
    "overflow-wrap": "anywhere",
  }


def test_no_option_of_the_page_is_outside_its_span(tmp_path):
  method = "gptq:activations=float"
  made_by = {"command": f"mxjax quantize a --method {method} --window-length 128"}
  source = written([run(method, mapped=False) | {"made_by": made_by}], tmp_path)
  body = source[source.index("<body>") :]
  shown = re.sub(r'<span class="option">[^ ]*</span>', "", body)
  assert body.count('class="option"') == 4 and "--" not in shown
  assert f"<td>{fragments.words(method)}</td>" in body
  assert f'<p class="verdict">{fragments.words(method)} stores' in body


@pytest.mark.skipif(not shutil.which("chromium"), reason="draws the page in Chromium")
def test_options_are_on_one_line_at_390_pixels(tmp_path):
  """A browser lays the page out; a script of the frame counts lines."""
  method = "gptq:activations=float"
  made_by = {"command": f"mxjax quantize a {' '.join(['--window-length 128'] * 9)}"}
  made_by["device"] = f"--{'x' * 90}"
  source = written([run(method, mapped=False) | {"made_by": made_by}], tmp_path)
  count = """<script>
    const lines = one => Math.round(one.getBoundingClientRect().height / 18);
    const all = [...document.querySelectorAll(".option")];
    parent.document.title = JSON.stringify([
      all.map(one => [one.textContent, lines(one)]),
      document.documentElement.scrollWidth])
    </script></body>"""
  (tmp_path / "page.html").write_text(source.replace("</body>", count))
  frame = '<iframe src="page.html" style="border:0;width:390px;height:3000px"></iframe>'
  (tmp_path / "frame.html").write_text(f"<title></title>{frame}")
  options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
  options += ["--allow-file-access-from-files", f"--user-data-dir={tmp_path / 'user'}"]
  drawn = subprocess.run(
    [
      "chromium",
      *options,
      "--virtual-time-budget=2000",
      f"file://{tmp_path}/frame.html",
    ],
    capture_output=True,
    text=True,
    timeout=60,
  )
  [told] = re.findall(r"<title>(.*)</title>", drawn.stdout)
  options, width = json.loads(html.unescape(told))
  assert len(options) == 12 and width == 390
  assert {text: lines for text, lines in options if lines != 1}.keys() == {
    made_by["device"]
  }


def test_what_leaves_inputs_as_they_are_is_held_against_rtn_that_does():
  made = losses(run() | MEASURED | {"method": "gptq [W4A16]"}, [3.0, 3.1, 3.2])
  label = "rtn:activations=float [W4A16]"
  assert "RTN" not in report.verdict([made | {"baseline": RTN}])
  alike = RTN | {"method": label}
  assert "and 90.5 of RTN" in report.verdict([made | {"baseline": alike}])
  assert report.baseline_of("gptq [W4A16]") == "rtn:activations=float"
  assert report.baseline_of("gptq") == "rtn"


def test_the_verdict_of_a_build_is_one_sentence_against_rtn_and_float(tmp_path):
  made = losses(run() | MEASURED | {"baseline": RTN}, [3.0, 3.1, 3.2])
  told = (
    "hires stores 5.04 bits a weight, 1.025 KiB in all, 0.44 times the size of BF16; "
    "it has a perplexity of 21.5 on wikitext (95 % interval 17.32 to 28.46), beside "
    "18.75 of the float model and 90.5 of RTN; it diverges by 0.1234 nats a token and "
    "flips 8.75% of the predictions (RTN: 1.25 nats and 50%)."
  )
  source = written([made], tmp_path)
  assert report.verdict([made]) == told
  assert source.index(f'<p class="verdict">{told}') < source.index("<table>")
  # RTN stands in the table, between the float model and the method.
  body = source[source.index("<tbody>") :]
  rows = re.findall(r"<tr><td>([^<]*)</td>", body)[:3]
  assert rows == ["float model", "rtn", "hires"]


def test_the_verdict_pairs_windows_with_those_of_rtn():
  made = losses(run() | MEASURED | {"baseline": copy.deepcopy(RTN)}, [3.0, 3.1, 3.2])
  plain = made["baseline"]["perplexity"]["wikitext"]
  plain["window_losses"] = [3.1, 3.21, 3.29]
  told = report.verdict([made])
  # Student's t of the differences -.10, -.11, -.09: -.1 -+ 4.303 * .01 / sqrt 3.
  assert "; on the same 3 windows it is 9.5% below RTN (95 % interval 7.2% to" in told
  plain["window_losses"] = [3.1, 3.0, 3.2]
  assert "; the same 3 windows do not tell it from RTN" in report.verdict([made])


def test_the_interval_is_that_of_the_windows():
  """Student's with two degrees of freedom, whose quantile is 4.303."""
  found = report.mean_interval(losses(run(), [3.0, 3.1, 3.2]), "wikitext")
  half = 4.30265 * 0.1 / math.sqrt(3)
  assert (found.low, found.high) == pytest.approx((3.1 - half, 3.1 + half), rel=1e-5)
  assert report.mean_interval(run(), "wikitext") is None


def test_only_what_was_measured_is_said_and_the_rest_is_named(tmp_path):
  bare = run(mapped=False)
  source = written([bare], tmp_path)
  assert "interval" not in report.verdict([bare])
  assert "diverges" not in report.verdict([bare]) and "RTN" not in report.verdict(
    [bare]
  )
  told = "Not measured: KL, flips, operator error; ask by --agreement and --operator-"
  assert fragments.words(f"{told}error.") in source
  assert "RTN was not measured beside it." in source
  assert "<th>flips, %</th>" not in source
  whole = written([run() | MEASURED | {"baseline": RTN}], tmp_path)
  assert "ot measured" not in whole
  assert "<th>KL, nats a token</th><th>flips, %</th>" in whole


def test_larger_is_larger(tmp_path):
  large = copy.deepcopy(run())
  large["size"] |= {"total": 4800}
  assert "2.00 times the size of BF16" in report.verdict([large])
  told = "hires is larger than BF16 here: "
  assert f"{told}what is not quantized" in written([large], tmp_path)
  large["size"]["quantized_linears"]["rounding"] = 2000
  assert f"{told}a map and a table have one size" in written([large], tmp_path)
  assert "is larger than" not in written([run()], tmp_path)
  large["size"] |= {"total": 1300}
  assert "is larger than half of BF16 here" in written([large], tmp_path)


def test_what_is_not_stored_is_not_in_the_legend(tmp_path):
  bare = copy.deepcopy(run())
  bare["size"]["quantized_linears"] |= {"maps": 0, "rounding": 0}
  bare["size"] |= {"recovery": 0}
  legend = lambda made: {n for n in report.SIZE_PARTS if f">{n}</span>" in made}
  assert "maps" in legend(written([run()], tmp_path))
  shown = legend(written([bare], tmp_path))
  assert {"codes", "scales"} <= shown and not shown & {*report.SIZE_PARTS[2:5]}


def test_of_several_methods_the_nearest_is_named(tmp_path):
  best = run() | MEASURED
  worse = run("rtn") | {"agreement": {"kl_mean": 0.5, "flips": 0.2}}
  worse["perplexity"]["wikitext"]["mean"] = 20.0
  told = report.verdict([worse, best])
  assert told.startswith("Of 2 methods, hires is nearest to the float model: it stores")
  assert "and 20 of RTN;" in told
  # Without KL of both, perplexity decides.
  assert "Of 2 methods, rtn is" in report.verdict([worse, run()])


def test_a_text_of_both_models_is_shown(tmp_path):
  texts = {"prompt": "The <moon>", "float": " is round.", "quantized": " is blue."}
  source = written([run() | {"sample": texts}], tmp_path)
  assert "The &lt;moon&gt;<b> is round.</b>" in source
  assert "The &lt;moon&gt;<b> is blue.</b>" in source
  assert "How it writes" not in written([run()], tmp_path)


def test_the_numbers_are_a_file_beside_it(tmp_path):
  made = run() | MEASURED | {"baseline": RTN}
  failed = {"method": "gptq", "error": "no"}
  rows = list(
    csv.DictReader(report.comma_separated_table([made, failed], "t").split("\n"))
  )
  assert [row["method"] for row in rows] == ["float model", "rtn", "hires"]
  assert [float(row["perplexity, wikitext"]) for row in rows] == [18.75, 90.5, 21.5]
  assert float(rows[2]["size, MiB"]) == 1050 / 2**20 and rows[0]["build, s"] == ""
  assert float(rows[1]["flips, %"]) == 50
  source = written([made], tmp_path, files=["result.json", "a b.csv"])
  assert '<a href="result.json">result.json</a><a href="a b.csv">' in source


def test_what_the_windows_do_not_tell_apart_is_said(tmp_path):
  runs = [
    losses(run("best", mapped=False), [3.0, 4.0, 3.5]),
    losses(run("close", mapped=False), [3.1, 3.9, 3.6]),
    losses(run("worse", mapped=False), [3.2, 4.21, 3.7]),
  ]
  source = written(runs, tmp_path)
  assert "3 windows of wikitext do not tell close from best" in source
  assert "do not tell" not in written(runs[::2], tmp_path)


def test_a_form_outside_the_contract_is_marked(tmp_path):
  weights_alone = run()
  weights_alone["record"]["form"] = "W4A16"
  told = "W4A16, outside the paper&#x27;s contract"
  assert told in written([weights_alone], tmp_path)
  assert "outside the paper" not in written([run()], tmp_path)


def test_the_glossary_is_folded(tmp_path):
  source = written([run()], tmp_path)
  assert "<details><summary>Words on this page</summary><dl>" in source
  for word in ("perplexity", "operator error", "KL", "bits a weight", "RTN"):
    assert f"<dt>{word}</dt>" in source


def test_what_made_a_result_is_shown(tmp_path):
  facts = {"date": "2026-01-02", "command": "mxjax <quantize>", "device": "cpu"}
  facts["versions"] = {"jax": "1.2", "flax": "3.4"}
  text = Page(written([run() | {"made_by": facts}], tmp_path)).text
  for said in ("2026-01-02", "mxjax <quantize>", "cpu", "jax 1.2, flax 3.4"):
    assert said in text


def chart(*series, **options):
  return xml.etree.ElementTree.fromstring(
    svg.line_chart(series, label="a chart", **options)
  )


def words_of(drawing):
  return [element.text for element in drawing.iter("text")]


def test_series_that_coincide_are_one_line_with_both_names():
  points = [(0.0, 1.0), (1.0, 2.0)]
  both = svg.Series("a", points, 0), svg.Series("b", list(points), 1)
  other = svg.Series("c", [(0.0, 1.0), (1.0, 3.0)], 2)
  assert [s.name for s in svg.merged([*both, other])] == ["a = b", "c"]
  drawn = chart(*both, other)
  assert len(drawn.findall("polyline")) == 2
  titles = [title.text for title in drawn.iter("title")]
  assert "a = b, layer 1: 2" in titles


def test_steps_hold_a_value_until_the_next_and_dots_have_no_line():
  points = [(0.0, 3.0), (2.0, 1.0)]
  steps = chart(svg.Series("best", points, 0, form="steps"))
  (line,) = steps.findall("polyline")
  corners = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
  (x0, y0), (x1, y1), (x2, y2) = corners
  assert (y0, x1) == (y1, x2) and y2 > y1 and x1 > x0
  dots = chart(svg.Series("all", points, 0, form="dots"))
  assert not dots.findall("polyline") and len(dots.findall("circle")) == 2


def test_a_log_axis_says_so_and_has_several_ticks():
  for values in ((0.0105, 0.0119), (0.021, 0.049), (1e-6, 1.0)):
    series = svg.Series("a", list(enumerate(values)), 0)
    logarithmic, plain = chart(series, log=True), chart(series)
    assert "logarithmic axis" in words_of(logarithmic)
    assert "logarithmic axis" not in words_of(plain)
    assert len(logarithmic.findall("line[@class='tick']")) >= 2


def test_bars_have_names_totals_and_only_measured_whiskers():
  bars = [
    ("a group", []),
    ("one", [svg.Part("x", 2.0, 0, 0.5)]),
    ("two", [svg.Part("x", 1.0, 1), svg.Part("y", 3.0, 2)]),
    ("none", [svg.Part("x", -1.0, 3)]),
    ("all", [svg.Part("x", math.inf, 4)]),
  ]
  drawn = xml.etree.ElementTree.fromstring(svg.rows(bars, label="bars"))
  words = "a group; one; 2; two; 4; none; -1; all; ∞".split("; ")
  assert words_of(drawn) == words
  assert len(drawn.findall("line[@class='whisker']")) == 1
  widths = [float(rect.get("width")) for rect in drawn.findall("rect")]
  assert widths[2] == pytest.approx(3 * widths[1], abs=0.2)
  assert widths[3] == 0 and max(widths) < svg.WIDTH - 60


def test_nothing_is_fetched(tmp_path):
  source = written([run()], tmp_path, files=["result.json"])
  page = Page(source)
  assert not re.search(r"https?:|//\w|url\(|@import", source)
  assert not {"script", "link", "img", "iframe", "object"} & set(page.tags)
  links = [value for key, value in page.attributes if key in ("href", "src")]
  assert links == ["result.json"]
  assert "prefers-color-scheme: dark" in source


def test_drawings_are_well_formed_and_hold_only_numbers(tmp_path):
  source = written([run(), run("rtn", mapped=False)], tmp_path)
  drawings = re.findall(r"<svg.*?</svg>", source, flags=re.DOTALL)
  for drawing in drawings:
    xml.etree.ElementTree.fromstring(drawing)
    assert not re.search(r'="[^"]*(nan|inf)\b', drawing)


def test_what_the_gate_compared(tmp_path):
  told = "KL 0.0625 nats a token, the same likeliest token at 87.5%, loss 2.750 beside"
  assert told in Page(written([run()], tmp_path)).text


def test_a_run_without_size_or_gate(tmp_path):
  plain = run("rtn", mapped=False)
  plain["size"] = None
  page = Page(written([plain], tmp_path))
  assert "The sanity gate of rtn was not run." in page.text
  assert "Stored bytes" not in page.text and "damping than" not in page.text


def test_everything_given_is_escaped(tmp_path):
  evil = '<img src=x onerror="alert(1)">'
  record = run(evil)
  record["perplexity"] = {evil: record["perplexity"]["wikitext"]}
  layer = record["record"]["layers"][0]
  layer["name"] = evil
  layer["linears"][evil] = linear(1, True) | {"map": evil, "rounding": evil}
  record["record"]["calibration"]["fingerprint"] = evil
  record["record"]["clock"]["seconds"][evil] = 1.0
  failed = {"method": evil, "error": evil}
  source = written([record, failed], tmp_path, title=evil, subtitle=evil)
  assert "img" not in Page(source).tags


def test_the_best_of_each_column_is_marked(tmp_path):
  best = '<td class="best">21.5<small>'
  worse = run("rtn", mapped=False)
  worse["perplexity"]["wikitext"]["mean"] = math.inf
  assert best not in written([worse, run()], tmp_path)
  worse["perplexity"]["wikitext"]["mean"] = 40.0
  source = written([worse, run()], tmp_path)
  assert best in source and "<td>40<small>" in source


def test_values_that_are_not_finite_are_written_not_drawn(tmp_path):
  broken = run()
  broken["perplexity"]["wikitext"]["mean"] = math.inf
  broken["record"]["layers"][1]["linears"][PATHS[0]]["error_final"] = math.nan
  page = Page(written([broken], tmp_path))
  assert "∞" in page.text


def test_a_method_that_failed_is_shown_with_its_sentence(tmp_path):
  failed = {"method": "gptq", "error": "gptq: the Hessian is not positive definite"}
  page = Page(written([run(), failed], tmp_path))
  assert failed["error"] in page.text
  assert Page(written([failed], tmp_path)).text.count(failed["error"]) == 1


def test_the_report_survives_json_and_takes_a_folder(tmp_path):
  runs = json.loads(json.dumps([run()]))
  before = copy.deepcopy(runs)
  path = report.write_report(tmp_path, runs, title="t", subtitle="s")
  assert path == tmp_path / "report.html"
  assert runs == before
  assert list(tmp_path.iterdir()) == [path]


def test_runs_that_cannot_be_shown_are_named(tmp_path):
  write = lambda runs: (
    lambda: report.write_report(tmp_path / "r.html", runs, title="t", subtitle="s")
  )
  refusals.check(
    [
      (write([]), "at least one run"),
      (write([{"method": "rtn"}]), "run 0 (rtn)", "perplexity", "record"),
    ]
  )


def test_numbers_have_four_digits_and_sizes_binary_units():
  for value, expected in (
    *((0, "0"), (12.3456, "12.35"), (0.00012, "1.2e-4")),
    *((-3e7, "-3e7"), (1e-3, "0.001")),
  ):
    assert numbers.number(value) == expected
  for value, expected in (
    *((0, "0 B"), (1023, "1023 B"), (1024, "1 KiB")),
    (1536 * 2**20, "1.5 GiB"),
  ):
    assert numbers.size(value) == expected


def test_ticks_are_round_and_inside():
  for low, high in ((0, 1), (-3, 17), (0.13, 0.14), (5, 5)):
    ticks = svg.linear_ticks(low, high)
    assert 1 <= len(ticks) <= 7
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)


def test_log_ticks_are_inside():
  assert svg.log_ticks(1e-4, 1.0) == pytest.approx([1e-4, 1e-3, 1e-2, 1e-1, 1.0])
  assert svg.log_ticks(0.012, 0.3) == pytest.approx([0.02, 0.05, 0.1, 0.2])
  assert svg.log_ticks(0.0105, 0.0119)[0] == pytest.approx(0.0106, abs=2e-4)
