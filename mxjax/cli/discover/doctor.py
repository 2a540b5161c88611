"""`mxjax discover doctor`: what this machine can do."""

import argparse
import os
import platform
from typing import Any


def add_parser(verbs: Any) -> None:
  """Adds the verb and its options."""
  help_text = "what this machine can do"
  parser = verbs.add_parser("doctor", help=help_text, description=help_text)
  parser.add_argument("--endpoint", metavar="URL", help="ask this endpoint, too")
  parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
  """Prints the system, the levels of the sandbox that it can enforce, and the key.

  Raises:
    OutageError: The endpoint does not answer.
  """
  from mxjax.cli.discover.run import probe
  from mxjax.cli.output import say
  from mxjax.discovery.sandbox import jail, supervisor
  from mxjax.discovery.search.runs import RunOptions

  say(f"{platform.system()} {platform.release()} {platform.machine()}")
  say(f"Landlock version {jail.landlock_version()}")
  for level in jail.JAILED:
    try:
      tracer = supervisor.Tracer(level)
    except supervisor.WorkerError as error:
      say(f"sandbox {level}: no. {error}")
      continue
    walls = ", ".join(f"{k} {v}" for k, v in tracer.features.items())
    tracer.close()
    say(f"sandbox {level}: yes ({walls})")
  key = "set" if os.environ.get("OPENAI_API_KEY") else "not set"
  say(f"OPENAI_API_KEY is {key}")
  if options.endpoint:
    settings = {"base_url": options.endpoint, "model": "doctor"}
    probe(RunOptions(task={}, config={}, proposer={"kind": "llm", **settings}))
