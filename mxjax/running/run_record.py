"""Measurements of a quantization run, for reports and results."""

import dataclasses
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def peak_memory_bytes() -> int:
  """Returns the peak resident memory of this process so far."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else peak * 1024


@dataclasses.dataclass
class StageClock:
  """Wall seconds and peak memory by stage, of all processes of a resumed run."""

  seconds: dict[str, float] = dataclasses.field(default_factory=dict)
  peak_bytes: dict[str, int] = dataclasses.field(default_factory=dict)

  @contextmanager
  def stage(self, name: str) -> Iterator[None]:
    """Adds the time of the `with` block to a stage."""
    start = time.perf_counter()
    yield
    spent = time.perf_counter() - start
    self.seconds[name] = self.seconds.get(name, 0.0) + spent
    peak = self.peak_bytes.get(name, 0)
    self.peak_bytes[name] = max(peak, peak_memory_bytes())


@dataclasses.dataclass(frozen=True)
class QuantizationRecord:
  """The measurements that a report shows, JSON-ready through `to_dict`."""

  program: dict[str, Any]
  contract_hash: str
  calibration: dict[str, Any]  #: Fingerprint and shape of the calibration tokens.
  layers: list[dict[str, Any]]  #: By layer: `linears` by path, `recovery` by fit.
  clock: StageClock
  #: The sanity gate's comparison, or None if it was not run.
  sanity: dict[str, Any] | None = None
  #: What `Program.prepare` recorded.
  preparation: dict[str, Any] = dataclasses.field(default_factory=dict)
  #: One entry for every resume of a killed run: finished layers (`layer`), unfinished
  #: files that were `discarded`, what `changed` in the environment.
  resumed: list[dict[str, Any]] = dataclasses.field(default_factory=list)
  #: Layers after which hidden states were written, so that a kill costs no more than
  #: these; None without a run folder, or if no layer was left to do.
  save_every: int | None = None
  #: Sizes of the axes and number of processes, or None for one device.
  mesh: dict[str, int] | None = None
  #: Divergence of every step of scale distillation, and how far the factors of each
  #: layer moved.
  tuning: dict[str, Any] | None = None

  def to_dict(self) -> dict[str, Any]:
    """Converts the record to nested dicts that JSON can represent."""
    return dataclasses.asdict(self)
