"""What is wrong with a kernel: one error class, one line of text, the line of the kernel."""

from typing import NamedTuple


class Fault(NamedTuple):
    """One fault of a kernel.

    ``kind`` is one of: race, divergence, out-of-bounds, uninitialised, write-to-input, inactive-lane,
    threadgroup-memory, overflow, undefined (found while running); address-space, not-msl, compile (found before).
    """

    kind: str
    file: str
    line: int
    message: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.file}:{self.line}: {self.message}"


class MslError(RuntimeError):
    """A kernel does not compile, or does something that Metal leaves undefined.

    ``kind``, ``file``, ``line`` and ``message`` are those of the first fault; ``faults`` has all that were found. The
    file is ``NAME.metal`` for the kernel's source, ``NAME.header.metal`` for its header and ``NAME.signature.metal``
    for what MLX writes between them.
    """

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults
        self.kind, self.file, self.line, self.message = faults[0]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        super().__init__(f"{faults[0]}{more}")
