"""A model for a command: whatever goes wrong with it becomes one line."""

from typing import Any


def loaded(name: str | None, **kwargs: Any) -> Any:
    """Load a model and its tokenizer.

    Args:
        name: As ``h2o_mlxlm.load`` takes it.
        kwargs: What else it takes.

    Raises:
        ValueError: It can't be loaded.
    """
    from h2o_mlxlm.models import load

    try:
        return load(name, **kwargs)
    except Exception as error:
        # A hub, a config, a weight or tokenizer file: each fails with errors of its own kind, few of which say where.
        said = str(error) if isinstance(error, (OSError, ValueError)) else repr(error)
        raise ValueError(said if name is None or name in said else f"{name}: {said}") from error
