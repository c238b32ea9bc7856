"""From a kernel's text to a C++ file: two things that no other compiler reads, and the call of one thread.

The first is ``threadgroup T x[N];``: a variable of the threadgroup. It becomes a reference to memory that the runtime
gives; a C++ static would do, but compilers may keep one in a register across a barrier. The second, for the strict
pass alone, is a vector's constructor. All else stays as it is, in its line.
"""

import re

from mslemu.errors import Fault, MslError
from mslemu.signature import ATTRIBUTES, Text
from mslemu.text import blank, line_of, masked

# A type: words and at most one pair of <>; then names with extents.
_DECLARATION = re.compile(
    r"\bthreadgroup\s+(?P<type>(?:(?:const|unsigned|signed|struct)\s+)*[A-Za-z_][\w:]*(?:\s*<[^;{}()]*>)?)\s+"
    r"(?P<names>[A-Za-z_]\w*\s*(?:\[[^\];{}]*\]\s*)*(?:,\s*[A-Za-z_]\w*\s*(?:\[[^\];{}]*\]\s*)*)*);"
)
_NAME = re.compile(r"\s*(\w+)\s*(.*?)\s*", re.DOTALL)
_VECTOR = r"(?:metal\s*::\s*)?(?:vec\s*<[^<>;(){}]*>|(?:float|half|bfloat|u?char|u?short|u?int|u?long|bool)[234])"
_ALIAS = re.compile(rf"\btypedef\s+{_VECTOR}\s+(\w+)\s*;|\busing\s+(\w+)\s*=\s*{_VECTOR}\s*;")


def files(name: str) -> dict[str, str]:
    """Names under which compilers report the parts of a kernel's text."""
    return {"header": f"{name}.header.metal", "declaration": f"{name}.signature.metal", "source": f"{name}.metal"}


def _variable(type_: str, declared: str, index: int) -> str:
    match = _NAME.fullmatch(declared)
    name, extents = match.groups() if match else (declared, "")
    reference = f"(&{name}){extents}" if extents else f"&{name}"
    pointer = f"(*){extents}" if extents else "*"
    call = 'MslemuCall{"threadgroup variable", __FILE__, __LINE__}'
    memory = f'mslemu_threadgroup({index}, sizeof({type_}{extents}), sizeof({type_}), "{name}", {call})'
    return f"threadgroup {type_} {reference} = *(threadgroup {type_} {pointer}){memory};"


def threadgroup_variables(source: str, file: str, *, strict: bool = False) -> str:
    """Give each threadgroup variable of the source its memory; for the strict pass, make it extern, which clang takes.

    Raises:
        MslError: a declaration is of a form not known here.
    """
    code = masked(source)
    out, position, index = [], 0, 0
    for match in _DECLARATION.finditer(code):
        out.append(source[position : match.start()])
        position = match.end()
        if strict:
            out.append("extern " + match.group())
            continue
        for declared in re.split(r",(?![^\[]*\])", match["names"]):
            out.append(_variable(match["type"], declared, index))
            index += 1
        out.append("\n" * match.group().count("\n"))
    rest = _DECLARATION.sub(lambda found: blank(found.group()), code)
    for match in re.finditer(r"\bthreadgroup\b[^;(){}*&]*[;={]", rest):
        message = f"not a threadgroup declaration that mslemu knows: {' '.join(match.group().split())}"
        raise MslError([Fault("not-msl", file, line_of(rest, match.start()), message)])
    return "".join([*out, source[position:]])


def _aliases(*texts: str) -> set[str]:
    """Names that the texts give to vector types."""
    return {first or second for text in texts for first, second in _ALIAS.findall(masked(text))}


def _vector_constructors(text: str, aliases: set[str]) -> str:
    """Write ``float4(a, b)`` and ``static_cast<float4>(a)`` as calls that clang's own vectors can have."""
    code = masked(text)
    names = "|".join([_VECTOR, *sorted(aliases)])
    constructor = rf"(?<![\w.:<])(?:({names})|static_cast\s*<\s*({names})\s*>)\s*\((?!\s*\))"
    out, position = [], 0
    for match in re.finditer(constructor, code):
        out.append(f"{text[position : match.start()]}metal::mslemu_make<{match[1] or match[2]}>(")
        position = match.end()
    return "".join([*out, text[position:]])


def _entry(text: Text) -> str:
    """One thread: the kernel, called with the launch's buffers and the thread's attributes."""
    arguments = [
        f"*({type_[:-1]}*)buffers[{i}]" if type_.endswith("&") else f"({type_})buffers[{i}]"
        for i, type_ in enumerate(text.buffers)
    ]
    for name in text.attributes:
        triple = f"metal::vec<uint, 3>(place->{name}.x, place->{name}.y, place->{name}.z)"
        arguments.append(triple if ATTRIBUTES[name] == "uint3" else f"place->{name}")
    return (
        f'extern "C" __attribute__((no_sanitize("thread", "undefined")))\n'
        f"void mslemu_entry(void* const* buffers, const MslemuPlace* place) {{\n"
        f"  {text.instance}({', '.join(arguments)});\n}}\n"
    )


def to_cpp(name: str, text: Text, *, strict: bool = False) -> str:
    """Return a C++ file: for running, or for the strict pass to look at."""
    names = files(name)
    entry, header = _entry(text), text.header
    source = threadgroup_variables(text.source, names["source"], strict=strict)
    if strict:
        aliases = _aliases(header, source)
        entry, header, source = (_vector_constructors(part, aliases) for part in (entry, header, source))
    parts = {"header": header + "\n", "declaration": text.declaration, "source": f"{source}\n}}\n"}
    lines = "".join(f'#line 1 "{names[part]}"\n{content}' for part, content in parts.items())
    return f'#include "mslemu_prelude.h"\n{lines}#line 1 "mslemu.entry"\n{entry}'
