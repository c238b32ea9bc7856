"""Undo and redo the rotary position of key rows."""

from h2o_rope.families import rotation_of
from h2o_rope.moves import derotate, rerotate, rope_remap_positions, rotate
from h2o_rope.rotation import Rotation

__all__ = ["Rotation", "derotate", "rerotate", "rope_remap_positions", "rotate", "rotation_of"]
