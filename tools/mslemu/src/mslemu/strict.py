"""The strict pass: clang's type checker, with real address spaces, over the kernel's text. Nothing is run.

Uses the ``libclang`` wheel; no compiler need be there.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from clang import cindex  # type: ignore[import-untyped]

from mslemu.errors import Fault, MslError

SPACES = {0: "thread", 1: "device", 2: "constant", 3: "threadgroup"}
_KIND = cindex.CursorKind
_DECLARATIONS = (_KIND.VAR_DECL, _KIND.PARM_DECL, _KIND.FIELD_DECL)
_INDIRECT = (cindex.TypeKind.POINTER, cindex.TypeKind.LVALUEREFERENCE)
_DOUBLES = (cindex.TypeKind.DOUBLE, cindex.TypeKind.LONGDOUBLE)
_CASTS = (_KIND.CSTYLE_CAST_EXPR, _KIND.CXX_REINTERPRET_CAST_EXPR, _KIND.CXX_STATIC_CAST_EXPR)
_NOT_MSL = {
    _KIND.CXX_NEW_EXPR: "new",
    _KIND.CXX_DELETE_EXPR: "delete",
    _KIND.CXX_THROW_EXPR: "throw",
    _KIND.CXX_TRY_STMT: "try",
    _KIND.GOTO_STMT: "goto",
}
_FLAGS = [
    "-x",
    "c++",
    "-std=c++17",
    "-nostdinc",
    "-nostdinc++",
    "-DMSLEMU_STRICT",
    "-fsyntax-only",
    "-ferror-limit=50",
    "-Wno-everything",
]


def _plain(message: str) -> str:
    """Write clang's address spaces as MSL's."""
    spaced = re.sub(r"__attribute__\(\(address_space\((\d)\)\)\)", lambda found: SPACES[int(found[1])], message)
    return re.sub(r" \(aka '[^']*'\)", "", spaced)


def _allowed(message: str) -> bool:
    """Whether Metal takes what clang refuses: a cast between its two 16-bit floats."""
    return bool(re.search(r"cast from .*not allowed", message)) and "_Float16" in message and "__bf16" in message


def _diagnosed(unit: Any, places: "_Places") -> Iterator[Fault]:
    for diagnostic in unit.diagnostics:
        if diagnostic.severity < cindex.Diagnostic.Error or _allowed(diagnostic.spelling):
            continue
        # An error inside the shim is the kernel's if one of its notes is in the kernel's text.
        where = [diagnostic.location, *(note.location for note in diagnostic.children)]
        place = next((p for p in map(places.of, where) if p), None)
        if place:
            message = _plain(diagnostic.spelling)
            notes = " ".join(_plain(note.spelling) for note in diagnostic.children)
            spaced = re.search(r"\b(device|constant|threadgroup|address space)\b", f"{message} {notes}")
            yield Fault("address-space" if spaced else "compile", *place, message)


class _Places:
    """From a line of the C++ file to a file and line of the kernel: libclang does not follow ``#line``."""

    def __init__(self, cpp: str, path: str) -> None:
        self.path = path
        self.bytes = cpp.encode()
        self.lines: list[tuple[str, int]] = []
        file, line = "", 0
        for text in cpp.split("\n"):
            self.lines.append((file, line))
            line += 1
            if found := re.fullmatch(r'#line (\d+) "(.*)"', text):
                file, line = found[2], int(found[1])

    def of(self, location: Any) -> tuple[str, int] | None:
        """Return the kernel's file and line, or nothing where the location is not in its text."""
        if location.file is None or location.file.name != self.path:
            return None
        file, line = self.lines[location.line - 1]
        return (file, line) if file.endswith(".metal") else None

    def specifiers(self, node: Any) -> str:
        """Return the text of a declaration before its name.

        The word before it counts as well: ``thread`` is a macro for nothing, which clang leaves out of the extent.
        """
        begin = self.bytes[: node.extent.start.offset].rstrip()
        before = re.search(rb"\w*$", begin)
        declared = self.bytes[node.extent.start.offset : node.location.offset]
        return ((before[0] if before else b"") + b" " + declared).decode()


def _kind(thing: Any) -> Any:
    """Return a node's or a type's kind, or nothing where the wheel's Python side doesn't know it, as of _Float16."""
    try:
        return thing.kind
    except ValueError:
        return None


def _missing_space(node: Any, places: _Places) -> bool:
    """Whether a declared pointer or reference names no address space. ``auto`` takes that of its value."""
    if _kind(node) not in _DECLARATIONS or _kind(node.type) not in _INDIRECT:
        return False
    if node.type.get_pointee().get_address_space():
        return False
    return not re.search(rf"\b(?:auto|{'|'.join(SPACES.values())})\b", places.specifiers(node))


def _casts_space(node: Any) -> tuple[str, str] | None:
    """From which address space to which other a cast goes, if it does."""
    if _kind(node) not in _CASTS or _kind(node.type) != cindex.TypeKind.POINTER:
        return None
    operand = list(node.get_children())[-1]
    while _kind(operand) == _KIND.UNEXPOSED_EXPR and (inner := list(operand.get_children())):
        operand = inner[-1]
    kind = _kind(operand.type)
    if kind == cindex.TypeKind.POINTER:
        before = operand.type.get_pointee().get_address_space()
    elif kind == cindex.TypeKind.CONSTANTARRAY:
        before = operand.type.element_type.get_address_space()
    else:
        return None
    after = node.type.get_pointee().get_address_space()
    return (SPACES.get(before, "?"), SPACES.get(after, "?")) if before != after else None


def _complaint(node: Any, places: _Places) -> tuple[str, str] | None:
    if _missing_space(node, places):
        return "address-space", f"'{node.spelling}' is a pointer or reference without an address space"
    if spaces := _casts_space(node):
        return "address-space", f"a cast from {spaces[0]} to {spaces[1]} memory"
    if _kind(node) in _NOT_MSL:
        return "not-msl", f"'{_NOT_MSL[node.kind]}' is not in MSL"
    if _kind(node) in _DECLARATIONS and _kind(node.type.get_canonical()) in _DOUBLES:
        return "not-msl", f"'{node.spelling}' is a double, which MSL has not"
    return None


def _walked(node: Any, places: _Places) -> Iterator[Fault]:
    for child in node.get_children():
        place = places.of(child.location)
        if place and not place[0].endswith(".signature.metal"):
            complaint = _complaint(child, places)
            if complaint:
                yield Fault(complaint[0], *place, complaint[1])
        if place or _kind(node) != _KIND.TRANSLATION_UNIT:
            yield from _walked(child, places)


def check(cpp: str, include: list[Path]) -> None:
    """Type-check a kernel's C++ file as `mslemu.lower.to_cpp` writes it for this pass.

    Raises:
        MslError: a pointer goes from one address space to another, has none, or the text is not MSL.
    """
    path = "kernel.cpp"
    places = _Places(cpp, path)
    flags = [*_FLAGS, *(word for folder in include for word in ("-isystem", str(folder)))]
    unit = cindex.Index.create().parse(path, args=flags, unsaved_files=[(path, cpp)])
    faults = list(_diagnosed(unit, places)) or list(_walked(unit.cursor, places))
    if faults:
        raise MslError(list(dict.fromkeys(faults)))
