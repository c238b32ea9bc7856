"""What every test run needs before mlx is imported: a fast BLAS, and shape checks in our packages."""

import importlib.util
import os

from jaxtyping import install_import_hook

# Test processes run side by side: one thread each multiplies faster than two that wait for each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if importlib.util.find_spec("h2o_mlxlm"):
    import h2o_mlxlm  # noqa: F401

# Not the modules that a user's values enter by: they answer bad input with errors of their own.
CORE = ("state", "attention", "evidence", "scoring", "eviction")
INNER = (*(f"h2o_core.{name}" for name in CORE), "h2o_rope.rotation")
install_import_hook(INNER, "beartype.beartype")
