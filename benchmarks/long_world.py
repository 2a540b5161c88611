"""The synthetic world with edits of 64 sizes, so that a long search never runs out."""

import dataclasses
import pathlib

from mxjax.discovery.tasks.world import World

SIZES = 64
HERE = str(pathlib.Path(__file__).parent)


class LongWorld(World):
  """A world with 2,304 edits of each program; see `long_search.py`."""

  @property
  def spec(self):
    """See `Task`."""
    return {**super().spec, "task": "long_world:LongWorld", "path": HERE}

  @property
  def edit_templates(self):
    """Those of the world, each in sizes from 1/64 to 1."""
    params = tuple({"amplitude": (n + 1) / SIZES} for n in range(SIZES))
    return [
      dataclasses.replace(template, params=params)
      for template in super().edit_templates
    ]
