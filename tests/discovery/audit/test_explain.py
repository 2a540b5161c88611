"""What a terminal is shown of a run."""

from mxjax.discovery.audit import explain
from mxjax.discovery.core import store
from tests.discovery.proposers import test_llm


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


def test_a_run_is_told_whole_to_somebody_who_was_not_there(tmp_path):
  answers = [test_llm.answer(code=test_llm.SOME, note="why it should help")]
  answers += [{"label": "refused", "code": "import os"}] * 3
  test_llm.run(tmp_path, *answers, budget=6)
  told = explain.whole(tmp_path)
  events = store.read_events(tmp_path)
  of = lambda kind: [e for e in events if e["event"] == kind]
  (found,) = of("verdict")
  values = of("outcome")[1]["values"]
  assert "why it should help" in told and "act: act" in told, "what the model said"
  assert f"residual: excess_{test_llm.A} = 0.9 over 0.5" in told
  assert f"loss {values['loss']:.6g} (down)" in told, "values beside how they moved"
  assert "(same, gone)" in told, "of a control, what is left of the edit's change"
  assert f"verdict: {found['verdict']} ({found['reason']})" in told
  assert f"response {found['response']} in {test_llm.A}: owed by" in told
  assert "margins: " in told and "loss 0.004" in told
  (refused,) = of("refused")
  assert f"refused (unusable): {refused['label']}; {refused['detail']}" in told
  source = explain.source(tmp_path, of("program")[-1]["champion"])
  assert source in told and test_llm.SOME.splitlines()[1] in source
  assert "Its change from the start:\n--- start\n+++ champion\n" in told
  assert "The run has ended: proposer: " in told
