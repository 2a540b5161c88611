"""Makes a packed trial one that goes on: its runs name the paths of this machine again.

  python benchmarks/discovery_trial_restore.py ARCHIVE DIR
  mxjax discover trial run DIR RUN --data DATA

`mxjax discover trial pack` leaves no path of a machine in an archive, and a resumed run
must repeat its own first event to the letter. So `models/trained` and the folder of the
trial are put back where they stood, and logs get a new chain of hashes. Sources and
versions must be those that the plan was frozen with; `run` refuses others.
"""

import argparse
import pathlib

from mxjax.discovery.studies import trial
from mxjax.models.loading import embedded


def restore(archive: pathlib.Path, folder: pathlib.Path) -> None:
  """Unpacks the archive of a trial into a new folder, to go on with its runs."""
  folder.mkdir(parents=True)
  trial.unpack(archive, folder)
  trained = embedded.trained_folder("llama").parent.resolve()
  places = {
    '"models/trained/': f'"{trained}/',
    '"trial/cassettes/': f'"{folder.resolve()}/cassettes/',
  }
  for path in (*folder.glob("runs/*/run.json"), *folder.glob("runs/*/log.jsonl")):
    data = path.read_bytes()
    for name, place in places.items():
      data = data.replace(name.encode(), place.encode())
    path.write_bytes(trial.digested(path, data))


if __name__ == "__main__":
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("archive", type=pathlib.Path)
  parser.add_argument("folder", type=pathlib.Path, help="a new folder")
  given = parser.parse_args()
  restore(given.archive, given.folder)
