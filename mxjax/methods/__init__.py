"""The quantizers, one readable file each, and their names."""

from mxjax.methods.brq import BRQ
from mxjax.methods.gptq import GPTQ
from mxjax.methods.hires import HIRES, HiRes
from mxjax.methods.mr_gptq import MR_GPTQ
from mxjax.methods.rtn import RTN
from mxjax.methods.torq import TORQ
from mxjax.methods.wush import WUSH, WUSH_R, Wush
from mxjax.program import Program

METHODS: dict[str, Program] = {
  program.name: program
  for program in (RTN, GPTQ, MR_GPTQ, BRQ, WUSH, WUSH_R, TORQ, HIRES)
}


def get(method: str | Program) -> Program:
  """Looks a program up by name, or passes one through.

  Args:
    method: A name in `METHODS` or a program.

  Raises:
    ValueError: An unknown name.
  """
  if isinstance(method, Program):
    return method
  if method not in METHODS:
    raise ValueError(
      f"methods: unknown method {method!r}; use one of {', '.join(METHODS)} or pass a "
      "Program."
    )
  return METHODS[method]


__all__ = [
  "BRQ",
  "GPTQ",
  "HIRES",
  "METHODS",
  "MR_GPTQ",
  "RTN",
  "TORQ",
  "WUSH",
  "WUSH_R",
  "HiRes",
  "Program",
  "Wush",
  "get",
]
