"""A bounded, heavy-hitter KV cache for mlx_lm.

Importing it loads OpenBLAS on Linux, if there is one: mlx's CPU back end multiplies with it, but only if it
is there first. Names load when they are first used, so that the command line answers ``--help`` at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from h2o_mlxlm.blas import load_openblas

if TYPE_CHECKING:
    from h2o_core import H2OConfig
    from h2o_mlxlm.adaptive import AdaptiveH2OKVCache
    from h2o_mlxlm.attention import scaled_dot_product_attention
    from h2o_mlxlm.budgets import calibrated_config, pyramid
    from h2o_mlxlm.cache import H2OKVCache
    from h2o_mlxlm.compat import KVCacheBuilder, KVCacheConfig, KVCacheFactory
    from h2o_mlxlm.integration import bounded_layers, calibrated_layers, install, make_prompt_cache, uninstall
    from h2o_mlxlm.models import load
    from h2o_mlxlm.needs import Needs, load_needs, save_needs
    from h2o_mlxlm.persistence import load_prompt_cache, save_prompt_cache
    from h2o_mlxlm.split import SplitH2OKVCache

load_openblas()

_HOME = {
    "AdaptiveH2OKVCache": "h2o_mlxlm.adaptive",
    "H2OConfig": "h2o_core.config",
    "H2OKVCache": "h2o_mlxlm.cache",
    "KVCacheBuilder": "h2o_mlxlm.compat",
    "KVCacheConfig": "h2o_mlxlm.compat",
    "KVCacheFactory": "h2o_mlxlm.compat",
    "Needs": "h2o_mlxlm.needs",
    "SplitH2OKVCache": "h2o_mlxlm.split",
    "bounded_layers": "h2o_mlxlm.integration",
    "calibrated_config": "h2o_mlxlm.budgets",
    "calibrated_layers": "h2o_mlxlm.integration",
    "install": "h2o_mlxlm.integration",
    "load": "h2o_mlxlm.models",
    "load_needs": "h2o_mlxlm.needs",
    "load_prompt_cache": "h2o_mlxlm.persistence",
    "make_prompt_cache": "h2o_mlxlm.integration",
    "save_needs": "h2o_mlxlm.needs",
    "save_prompt_cache": "h2o_mlxlm.persistence",
    "pyramid": "h2o_mlxlm.budgets",
    "scaled_dot_product_attention": "h2o_mlxlm.attention",
    "uninstall": "h2o_mlxlm.integration",
}

__all__ = [
    "AdaptiveH2OKVCache",
    "H2OConfig",
    "H2OKVCache",
    "KVCacheBuilder",
    "KVCacheConfig",
    "KVCacheFactory",
    "Needs",
    "SplitH2OKVCache",
    "bounded_layers",
    "calibrated_config",
    "calibrated_layers",
    "install",
    "load",
    "load_needs",
    "load_prompt_cache",
    "make_prompt_cache",
    "pyramid",
    "save_needs",
    "save_prompt_cache",
    "scaled_dot_product_attention",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # With any name, so that mlx_lm's load_prompt_cache knows our classes from then on.
    import_module("h2o_mlxlm.split")
    return getattr(import_module(_HOME[name]), name)
