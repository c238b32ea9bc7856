"""Array types for signatures: jaxtyping's where it is installed, plain names where it is not.

Tests install jaxtyping and check every shape; a user of the package needs mlx alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int32, Integer
else:
    try:
        from jaxtyping import Bool, Float, Int32, Integer
    except ImportError:

        class _Unchecked:
            def __class_getitem__(cls, item: Any) -> Any:
                return item[0]

        Bool = Float = Int32 = Integer = _Unchecked

__all__ = ["Bool", "Float", "Int32", "Integer"]
