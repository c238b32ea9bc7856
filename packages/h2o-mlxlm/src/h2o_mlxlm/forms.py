"""In what form the numbers of rows are stored, and how they come out again. Knows no slots.

x ≈ scale · q + bias,  q of ``bits`` bits, one scale and one bias in x's dtype for each group of numbers
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import mlx.core as mx

BITS, GROUP_SIZES, QUANTIZERS = (8, 4), (32, 64, 128), ("per_token", "kivi", "gear")

RANK, OUTLIERS = 2, 0.02
"""GEAR's correction of a block: the rank, and the share of numbers that are kept as they are."""

Stored = mx.array | Sequence[mx.array]
"""An array, or the arrays that rows are in together."""

Pair = tuple[Any, Any]
"""One for keys, one for values."""


class RowForm(NamedTuple):
    """Each row by itself: as it comes, or quantised in groups along its width."""

    bits: int | None = None  # None: as it comes
    group_size: int = 64

    def closed(self, x: mx.array) -> tuple[mx.array, ...]:
        """Store rows x [..., D]: (x,), or ``mx.quantize``'s words, scales and biases.

        A group never leaves its row, so rows are written and overwritten without touching one another.
        """
        return (x,) if self.bits is None else tuple(mx.quantize(x, self.group_size, self.bits))

    def opened(self, parts: Sequence[mx.array]) -> mx.array:
        """Return rows [..., D] as attention takes them, in the dtype they came in."""
        if self.bits is None:
            return parts[0]
        words, scales, biases = parts
        return mx.dequantize(words, scales, biases, self.group_size, self.bits)

    def check_width(self, name: str, width: int) -> None:
        """Refuse rows that groups don't divide; see ``_check_groups``."""
        if self.bits is not None:
            _check_groups(name, width, self.group_size)


class BlockForm(NamedTuple):
    """Blocks of tokens that are written once: groups along the tokens of a channel, or along a token's channels.

    With ``corrected`` a block keeps its outliers as they are and a low-rank part of what quantising left over:

        x ≈ quantised(x without outliers) + U V + outliers,  U V the best rank ``RANK`` in squares

    Source:
        Liu et al., KIVI (arXiv 2402.02750); Kang et al., GEAR (arXiv 2403.05527), section 3. There outliers are the
        largest and smallest of each channel; here those furthest from the middle of their group, over the block,
        for a channel of 32 tokens has less than one.
    """

    bits: int
    n_tokens: int  # of a block, and numbers of a group
    per_channel: bool
    corrected: bool = False

    def closed(self, blocks: mx.array) -> tuple[mx.array, ...]:
        """Store blocks [B, H, K, g, D], each part [B, H, K, *, *]: words, scales, biases, and what corrects them."""
        x = blocks.swapaxes(-1, -2) if self.per_channel else blocks
        if not self.corrected:
            return tuple(mx.quantize(x, self.n_tokens, self.bits))
        *outliers, inner = self._without_outliers(x)
        words, scales, biases = mx.quantize(inner, self.n_tokens, self.bits)
        error = inner - mx.dequantize(words, scales, biases, self.n_tokens, self.bits)
        return (words, scales, biases, *low_rank(error, RANK), *outliers)

    def opened(self, parts: Sequence[mx.array]) -> mx.array:
        """Return blocks [B, H, K, g, D] in the dtype they came in."""
        words, scales, biases, *correction = parts
        x = mx.dequantize(words, scales, biases, self.n_tokens, self.bits)
        if correction:
            left, right, numbers, places = correction
            flat = (x + left @ right).flatten(-2)
            x = mx.put_along_axis(flat, places[..., 0].astype(mx.uint32), numbers[..., 0], axis=-1).reshape(x.shape)
        return x.swapaxes(-1, -2) if self.per_channel else x

    def check_width(self, name: str, width: int) -> None:
        """Refuse rows that groups don't divide, where they lie along the width; see ``_check_groups``."""
        if not self.per_channel:
            _check_groups(name, width, self.n_tokens)

    def _without_outliers(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """Numbers furthest from the middle of their group, their places in the block, x with the middle there."""
        groups = x.reshape(*x.shape[:-1], -1, self.n_tokens)
        middle = (groups.max(axis=-1, keepdims=True) + groups.min(axis=-1, keepdims=True)) / 2
        far, near = mx.abs(groups - middle).flatten(-3), mx.broadcast_to(middle, groups.shape).flatten(-3)
        flat = x.flatten(-2)
        places = mx.argsort(far, axis=-1)[..., -max(1, round(OUTLIERS * flat.shape[-1])) :]
        numbers = mx.take_along_axis(flat, places, axis=-1)
        inner = mx.put_along_axis(flat, places, mx.take_along_axis(near, places, axis=-1), axis=-1)
        return numbers[..., None], places[..., None].astype(mx.uint16), inner.reshape(x.shape)


def low_rank(x: mx.array, rank: int) -> tuple[mx.array, mx.array]:
    """Return U [..., n, rank] and V [..., rank, m], whose product is x's best approximation of that rank in squares."""
    # mlx has no other device for it.
    u, s, v = mx.linalg.svd(x.astype(mx.float32), stream=mx.cpu)
    return (u[..., :rank] * s[..., None, :rank]).astype(x.dtype), v[..., :rank, :].astype(x.dtype)


Form = RowForm | BlockForm


def forms(kv_bits: int | Pair | None, kv_group_size: int | Pair, kv_quantizer: str) -> tuple[Form, Form]:
    """Read what the user asks for: a number is for keys and values alike, a pair for each.

    Raises:
        ValueError: Bits, a group size or a quantiser that there are none of.
    """
    pairs = [tuple(x) if isinstance(x, tuple | list) else (x, x) for x in (kv_bits, kv_group_size)]
    for name, pair, allowed in (("kv_bits", pairs[0], (None, *BITS)), ("kv_group_size", pairs[1], GROUP_SIZES)):
        if len(pair) != 2 or any(isinstance(x, float) or x not in allowed for x in pair):
            raise ValueError(
                f"{name} must be {' or '.join(map(str, allowed))}, or a pair of them for keys and values, "
                f"got {kv_bits if name == 'kv_bits' else kv_group_size!r}"
            )
    if kv_quantizer not in QUANTIZERS:
        raise ValueError(f"kv_quantizer must be one of {', '.join(map(repr, QUANTIZERS))}, got {kv_quantizer!r}")
    if pairs[0] == (None, None) and (pairs[1], kv_quantizer) != ((64, 64), "per_token"):
        raise ValueError(
            f"kv_group_size={kv_group_size!r} and kv_quantizer={kv_quantizer!r} do nothing without kv_bits: pass "
            "kv_bits=8 or 4 as well"
        )
    keys, values = (
        # One that groups nothing is the same whatever their size.
        RowForm()
        if bits is None
        else RowForm(bits, size)
        if kv_quantizer == "per_token"
        else BlockForm(bits, size, per_channel, kv_quantizer == "gear")
        for bits, size, per_channel in zip(*pairs, (True, False), strict=True)
    )
    return keys, values


def _check_groups(name: str, width: int, group_size: int) -> None:
    if width % group_size:
        fitting = [size for size in GROUP_SIZES if width % size == 0]
        raise ValueError(
            f"{name} have a head size of {width}, which groups of kv_group_size={group_size} don't divide: "
            + (f"use {' or '.join(map(str, fitting))}" if fitting else "leave kv_bits out with this model")
        )
