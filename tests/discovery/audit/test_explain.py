"""What a terminal is shown of a run."""

from mxjax.discovery.audit import explain


def test_explain_escapes_what_a_model_wrote():
  evil = "x\x1b[2J\x9b\u202e\nverdict: supported"
  body = {"program": evil, "parent": evil, "residual": None, "response_to": evil}
  account = {"name": evil, "statement": evil, "predictions": {evil: {"loss": "up"}}}
  outcome = {"kind": evil, "condition": evil, "status": "ok", "charged": 1}
  told = explain.Story(
    {"id": evil, "n": 1, "label": evil, "note": evil}
    | {"packet": {**body, "explanations": [account]}},
    ({**outcome, "detail": evil},),
    (evil,),
    {"verdict": "x", "reason": evil, "survivors": [], "excluded": [], "explicit": ""}
    | {"response": evil, "observed": {}},
    ({"checker": evil, "response": evil, "implemented": True, "detail": evil},),
    None,
    "+\tx = 1\n-" + evil,
  )
  text = explain.text(told, {})
  assert not [c for c in text if not c.isprintable() and c not in "\n\t"]
  assert "\n+\tx = 1\n" in text
  lines = [line for line in text.splitlines() if line.startswith("verdict: supp")]
  assert len(lines) == 1  # of the difference, whose lines are the program's


def test_explain_tells_all_controls_that_were_skipped(tmp_path):
  """Some go before another text is asked, others after it has answered."""
  body = {"program": "p", "parent": "", "residual": None, "response_to": []}
  events = [
    {"event": "packet", "id": "x", "n": 1, "packet": {**body, "explanations": []}},
    {"event": "skipped", "packet": "x", "controls": ["permute"]},
    {"event": "skipped", "packet": "x", "controls": ["dose"]},
  ]
  (story,) = explain.stories(tmp_path, events)
  assert "run: permute, dose" in explain.text(story, {})
