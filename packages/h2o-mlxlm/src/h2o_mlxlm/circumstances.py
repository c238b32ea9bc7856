"""Where and with what something was measured."""

import platform
from collections.abc import Sequence
from datetime import date
from importlib import metadata
from typing import Any


def circumstances(packages: Sequence[str] = ("mlx", "mlx-lm", "h2o-mlxlm")) -> dict[str, Any]:
    """Say where and with what a measurement is made: device, machine, versions of these packages, date."""
    import mlx.core as mx

    return {
        "device": str(mx.default_device()),
        "chip": str(mx.device_info().get("device_name", platform.machine())),
        "machine": platform.platform(),
        "versions": {name: metadata.version(name) for name in packages},
        "date": date.today().isoformat(),
    }
