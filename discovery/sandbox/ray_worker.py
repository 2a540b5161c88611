"""Evaluator lanes on a Ray cluster: the same jailed workers, on other machines.

Ray is an optional extra. The trajectory does not depend on it: calls are committed in
the packets' order, wherever and whenever they end.
"""

from collections.abc import Mapping
from typing import Any

from mxjax.discovery.core import task
from mxjax.discovery.sandbox import jail
from mxjax.discovery.sandbox.jailed_executor import EvaluatorWorker


def _make(
  spec: Mapping[str, Any], level: str, limits: Mapping[str, Any]
) -> EvaluatorWorker:
  return EvaluatorWorker(task.load(spec), level, jail.Limits(**limits))


class RayWorker:
  """One actor that holds one lane."""

  def __init__(self, problem: task.Task, level: str, limits: jail.Limits) -> None:
    """Starts the actor on any node of the cluster that this process is joined to.

    Raises:
      ImportError: Ray is not installed.
    """
    import dataclasses

    try:
      import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
      raise ImportError(
        "discover: --ray needs the optional extra; run `pip install mxjax[ray]`."
      ) from error
    if not ray.is_initialized():
      ray.init(log_to_driver=False, include_dashboard=False)
    self._ray = ray

    class Actor:
      """Holds the lane; made on the node that runs it."""

      def __init__(self, *arguments: Any) -> None:
        """Makes the lane."""
        self.lane = _make(*arguments)

      def run(self, call: Any, artifacts: Any) -> dict[str, Any]:
        """See `EvaluatorWorker.run`."""
        return self.lane.run(call, artifacts)

      def close(self) -> None:
        """See `EvaluatorWorker.close`."""
        self.lane.close()

    actor = ray.remote(num_cpus=1)(Actor)
    self._actor = actor.remote(dict(problem.spec), level, dataclasses.asdict(limits))

  def run(
    self, call: Mapping[str, Any], artifacts: Mapping[str, tuple[str, bytes, bytes]]
  ) -> dict[str, Any]:
    """See `EvaluatorWorker.run`."""
    return self._ray.get(self._actor.run.remote(dict(call), dict(artifacts)))

  def close(self) -> None:
    """Ends the actor and its workers."""
    self._ray.get(self._actor.close.remote())
    self._ray.kill(self._actor)
