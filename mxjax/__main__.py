"""`python -m mxjax`: the command line."""

import sys

from mxjax.cli.main import main

if __name__ == "__main__":
  sys.exit(main())
