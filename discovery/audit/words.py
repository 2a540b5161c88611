"""The words of a run in plain English, for its report and its explanation."""

from collections.abc import Mapping

from mxjax.discovery.core.verdict import Response, Verdict

MEANINGS: Mapping[str, str] = {
  Verdict.SUPPORTED: "the target improved, and only the focal account is left",
  Verdict.TARGET_ONLY: "the target improved, but an account other than the focal one "
  "is left",
  Verdict.MEDIATOR_ONLY: "what was predicted beside the target came, without a gain",
  Verdict.NO_EFFECT: "nothing predicted happened, or the program is its parent",
  Verdict.UNRESOLVED: "nothing was decided",
  Verdict.UNSAFE: "a condition broke the contract, or the parent was not restored",
}
"""What each verdict says."""
REASONS: Mapping[str, str] = {
  "focal_alone": "what ran excluded every other account",
  "focal_excluded": "what ran excluded the focal account",
  "several_left": "what ran could not tell several accounts apart",
  "none_left": "what ran excluded every account",
  "signature_without_gain": "what the focal account predicted beside the target came",
  "neither_gain_nor_signature": "one account is left, and nothing that was predicted "
  "of the target or beside it came",
  "parent_equivalent": "it executes or comes out as its parent does",
  "within_margins": "it executes otherwise than its parent, and moved no observable by "
  "more than its margin",
  "within_margin": "the focal account predicted a gain, and the target improved by "
  "less than its margin, which neither shows nor refutes it",
  "contract_or_rollback": "a condition broke the contract, or the parent was not "
  "restored",
}
"""Why, by the reason that stands beside a verdict."""
ASKS: Mapping[str, str] = {
  Response.EXTEND: "go further with what was supported, so that the observable of the "
  "question moves again",
  Response.REPAIR_EXPLANATION: "register a focal account that is not excluded, for a "
  "change that matters",
  Response.REPAIR_TRANSFER: "make what was shown reach the target",
  Response.RETIRE: "keep the change out of later programs",
  Response.ADD_DISCRIMINATOR: "run a new control that tells the accounts that are left "
  "apart, or register a new account where none is left",
  Response.REJECT: "keep the change out of later programs",
}
"""What each response is that a verdict requires of the next program."""
SYMBOLS: Mapping[str, str] = {
  "down, same, up": "How an observable moved from the parent; up to its margin it is "
  "the same.",
  "kept, lost, gone, reversed": "What a control left of the edit's own change: all of "
  "it but for the margin, less than that, no more than the margin, or a change the "
  "other way. The first of two words compares with the parent and the second with the "
  "edit, so that a control may be the same as the parent and kept.",
}
"""How an observable moved."""
STATES: Mapping[str, str] = {
  "ok": "It ran, and nothing is compared: the edit itself did not move the observable, "
  "so a control can leave nothing of it.",
  "not needed": "It was registered and did not run, since the accounts that were left "
  "did not need it.",
}
"""What stands in the place of an observation where there is none."""
WORDS: Mapping[str, str] = {
  "program": "A candidate that ran; it is named by the beginning of its digest.",
  "target": "What the search minimizes, on the visible model.",
  "held-out target": "The same on a model that the search never sees.",
  "observable": "A number that a call measures. The target is one of them.",
  "margin": "The change of an observable that counts; a smaller one is none.",
  "edit": "What a proposed program changes of its parent.",
  "packet": "An edit with its question: accounts, their predictions and controls, "
  "registered before anything runs.",
  "condition": "One execution of a packet: the program itself (primary), a control, or "
  "a probe.",
  "control": "An execution that takes something away from the edit, or measures it "
  "elsewhere.",
  "probe": "An execution without the answer that an edit gives to an earlier verdict; "
  "for a change that is forbidden, with it. It tells whether the answer matters.",
  "call": "One charged execution by the evaluator.",
  "residual": "A measured quantity over its threshold: the question of a packet.",
  "account": "An explanation of why the edit should help, with its predictions.",
  "focal": "The account that the proposer put first.",
  "rival": "An account that predicts the same of the primary run as the focal one. "
  "Some are the search's own: another part of the edit did it, or luck.",
  "straw man": "An account that is no rival: whatever the primary run shows, it "
  "excludes that account or the focal one.",
  "explicit": "Of a verdict: it excludes the focal account or a rival, and not only "
  "straw men.",
  "demand": "The response that a verdict requires of later programs. It is owed until "
  "a check finds it met, or it is given up after two failures.",
  **SYMBOLS,
  **STATES,
  **{name: f"Verdict: {meaning}." for name, meaning in MEANINGS.items()},
  **{name: f"Response: {meaning}." for name, meaning in ASKS.items()},
}
"""What a reader of a report needs to know, in the order of need."""
BECAME: Mapping[str, str] = {
  "measured": "a later revision brought it under its threshold",
  "supported": "an account of it was borne out",
  "closed": "the response to that was made, or its observable has no room left",
  "left": "its program is no longer retained",
}
"""What became of a question, by the word of its status."""
OWING: Mapping[str, str] = {
  "owed": "owed by revisions of {}",
  "failed": "not met by an answer, so still owed by revisions of {}",
  "met": "met by a revision of {}",
  "abandoned": "given up after failed answers, by revisions of {}",
  "superseded": "replaced by the same demand of a later verdict, on revisions of {}",
  "resolved": "settled by a later verdict on its question, for revisions of {}",
  "within_margin": "not demanded of revisions of {}",
  "left": "dropped after answers about something else, by revisions of {}",
  "at_floor": "not demanded of revisions of {}",
}
"""What became of a demand on the revisions of a program."""


def concluded(verdict: Mapping[str, str]) -> str:
  """Returns what a verdict and its reason say, in words."""
  told = (MEANINGS.get(verdict["verdict"]), REASONS.get(verdict["reason"]))
  return "; ".join(filter(None, told)) or "words of another version"
