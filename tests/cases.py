"""Cases of a parametrization that only `make test-all` runs."""

import pytest


def slow(*cases):
  """Marks cases slow: between corners that stay, or compiled anew for little more.

  A case of several values is a tuple, as in the list that it is spread into.
  """
  mark = pytest.mark.slow
  return [
    pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
    for case in cases
  ]
