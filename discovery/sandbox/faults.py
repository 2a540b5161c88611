"""What a candidate's fault in an evaluator phase is called."""

from mxjax.discovery.core.task import ContractError, Status
from mxjax.discovery.sandbox.artifact import RefusedError

MEMORY_SIGNS = ("RESOURCE_EXHAUSTED", "ut of memory", "bad_alloc")


def status_of(error: BaseException) -> tuple[Status, str]:
  """The status and a bounded detail.

  The pipeline adds the place of an error by raising another from it, so the cause
  decides: a broken contract stays one wherever it is noticed.
  """
  detail = f"{type(error).__name__}: {error}"[:1000]
  cause: BaseException | None = error
  while cause is not None:
    if isinstance(cause, RefusedError | ContractError):
      return Status.CONTRACT, detail
    if isinstance(cause, FloatingPointError):
      return Status.NOT_FINITE, detail
    if isinstance(cause, MemoryError) or any(s in str(cause) for s in MEMORY_SIGNS):
      return Status.MEMORY, detail
    cause = cause.__cause__
  return Status.CRASHED, detail
