"""Which platform a computation is for."""

import jax


def target_platform() -> str:
  """The platform the computation is for: of the abstract mesh if one is set.

  A mesh with an abstract device is how code is compiled for a machine that is not
  there; otherwise it is the default backend.
  """
  device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
  platform = jax.default_backend() if device is None else device.platform
  return "gpu" if platform in ("gpu", "cuda") else platform
