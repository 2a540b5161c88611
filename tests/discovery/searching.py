"""What tests of searches share: scripts of proposals, executors that count, runs."""

from mxjax.discovery.core import store
from mxjax.discovery.core.proposal import ExhaustedError, Record
from mxjax.discovery.sandbox.local_executor import LocalExecutor
from mxjax.discovery.search import search
from mxjax.discovery.search.cached_evaluator import CachedEvaluator

RECORD = Record("p", "", "", 1, {}, {}, "p", {"loss": 3.0}, {})
"""An executed program, for tests that give it other fields."""


class Scripted:
  """Makes the proposals of a list, one a call; keeps what it was told.

  What is no proposal yet is a function of the context.
  """

  name = "scripted"

  def __init__(self, *script, at_end=ExhaustedError):
    self._left, self._at_end, self.contexts = list(script), at_end, []

  def propose(self, context):
    self.contexts.append(context)
    if not self._left:
      raise self._at_end("the script has ended")
    made = self._left.pop(0)
    return made(context) if callable(made) else made


class Counting(LocalExecutor):
  """Counts what is really executed, and can be stopped like a killed process."""

  executed, stop_after = 0, None

  def run(self, calls, on_done):
    def counted(*arguments):
      on_done(*arguments)
      self.executed += 1
      if self.executed == self.stop_after:
        raise KeyboardInterrupt

    super().run(calls, counted)


def run(folder, task, proposer, executor=None, ask=None, **config):
  """Runs or resumes a search in a folder; `ask` is the free proxy."""
  kept = store.Store(folder)
  evaluator = CachedEvaluator(task, executor or LocalExecutor(task), kept)
  settings = search.SearchConfig(**config)
  running = search.Search(settings, evaluator, proposer, kept, ask=ask)
  try:
    running.run()
  finally:
    kept.close()
  return running


def log(folder):
  """The bytes that a run wrote."""
  return (folder / "log.jsonl").read_bytes()
