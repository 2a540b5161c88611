"""Makes a packed trial one that goes on: its runs name the paths of this machine again.

  python benchmarks/discovery_trial_restore.py ARCHIVE DIR
  mxjax discover trial run DIR RUN --data DATA

Sources and versions must be those that the plan was frozen with; `run` refuses others.
"""

import argparse
import pathlib

from mxjax.discovery.studies import trial

if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("archive", type=pathlib.Path)
  parser.add_argument("folder", type=pathlib.Path, help="a new folder")
  given = parser.parse_args()
  trial.restore(given.archive, given.folder)
