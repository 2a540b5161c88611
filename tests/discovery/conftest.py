"""Workers behind walls compile as the tests beside them do."""

import os

import pytest

from mxjax.discovery.sandbox import supervisor


@pytest.fixture(scope="module", autouse=True)
def compiling_of_workers():
  """Adds the two variables of tests/conftest.py to a worker's clean environment."""
  clean = supervisor._clean_environment
  ours = lambda: {
    name: os.environ[name] for name in ("JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS")
  }
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(supervisor, "_clean_environment", lambda: clean() | ours())
    yield
