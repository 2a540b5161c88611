"""Fan-out on a local Ray cluster; skipped where the extra is not installed."""

import pytest

from mxjax.cli.main import main

ray = pytest.importorskip("ray", reason="the optional extra `ray` is not installed")


@pytest.mark.slow
def test_a_ray_cluster_does_not_change_the_trajectory(tmp_path):
  logs = []
  for name, more in (("pool", []), ("ray", ["--ray", "--workers", "2"])):
    folder = tmp_path / name
    arguments = ["discover", "run", "--task", "world", "--seed", "3", "--budget", "5"]
    more = [*more, "--holdout", "off", "--out", str(folder)]
    assert main([*arguments, *more]) == 0
    logs.append((folder / "log.jsonl").read_bytes())
  ray.shutdown()
  assert logs[0] == logs[1]
