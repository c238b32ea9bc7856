"""Undo and redo the rotary position of key rows."""

from h2o_rope.families import rotation_of
from h2o_rope.rotation import Rotation, derotate, rerotate, rotate

__all__ = ["Rotation", "derotate", "rerotate", "rotate", "rotation_of"]
