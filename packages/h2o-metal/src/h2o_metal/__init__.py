"""The steps of h2o-core that are worth a kernel, under one roof.

There are no kernels yet: every function here is the reference's own. The package is where they will come,
one at a time and with the same signatures, so that nothing that calls them has to change.
"""

from h2o_metal.attention import attend
from h2o_metal.eviction import decode_step, evict, survivors, victims

__all__ = ["attend", "decode_step", "evict", "survivors", "victims"]
