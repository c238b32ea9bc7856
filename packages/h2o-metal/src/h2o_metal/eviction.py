"""The decode step and eviction behind the signatures their kernels will have; today the reference answers."""

from h2o_core import decode_step, evict, survivors, victims

__all__ = ["decode_step", "evict", "survivors", "victims"]
