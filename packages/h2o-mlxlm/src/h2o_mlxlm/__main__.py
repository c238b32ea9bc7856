"""``python -m h2o_mlxlm``."""

import sys

from h2o_mlxlm.cli import main

if __name__ == "__main__":
    sys.exit(main())
