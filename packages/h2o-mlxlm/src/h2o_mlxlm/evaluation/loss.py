"""Teacher-forced loss of a bounded cache beside the full cache's, on windows of a text.

A window is ``context`` tokens and then ``scored`` ones. As in mlx_lm's generation the context is fed in large
calls but for its last token, which goes alone, and so does every token after it: or nothing would be evicted
while it is scored.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from h2o_mlxlm.evaluation.methods import FULL, Variant, method_of
from h2o_mlxlm.evaluation.passes import log_probabilities, numbers, read_prompt, sizes
from h2o_mlxlm.evaluation.results import Rows
from h2o_mlxlm.identity import identity

COLUMNS = (
    *("run", "text", "window", "method", "budget", "settings", "config", "seed", "label"),
    *("loss", "full_loss", "above_full", "agreement", "kl", "cache_bytes", "tokens_kept"),
)
KEY = COLUMNS[:9]
SLICE = 16  # scored tokens of a call of the full cache


class Shape(NamedTuple):
    """How windows are read."""

    context: int = 1024
    scored: int = 128
    batch: int = 16
    prefill_step_size: int = 2048


class Full(NamedTuple):
    """What the full cache's model says of the scored tokens, T of them."""

    logprobs: mx.array  # float16 [B, T, V]
    best: mx.array  # int32 [B, T], the likeliest token
    losses: mx.array  # float32 [B, T], nats


def full_cache(model: Any, windows: mx.array, shape: Shape) -> Full:
    """Run the full cache; nothing is evicted, so many scored tokens go in one call."""
    caches = method_of(FULL).make(model, 0, {}, 0)
    logits = read_prompt(model, caches, windows[:, : shape.context], shape.prefill_step_size)[:, None]
    parts = [_looked_at(logits, windows[:, shape.context : shape.context + 1])]
    last = windows.shape[1] - 1
    for start in range(shape.context, last, SLICE):
        end = min(start + SLICE, last)
        logits = model(windows[:, start:end], cache=caches)
        parts.append(_looked_at(logits, windows[:, start + 1 : end + 1]))
    return Full(*(mx.concatenate(list(part), axis=1) for part in zip(*parts, strict=True)))


def _looked_at(logits: mx.array, targets: mx.array) -> Full:
    logprobs = log_probabilities(logits)
    losses = -mx.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
    part = Full(logprobs.astype(mx.float16), mx.argmax(logits, axis=-1).astype(mx.int32), losses)
    mx.eval(part)
    return part


class FullStore:
    """The full cache's outcomes on disk, a file for each window, so that each is computed once.

    Args:
        folder: Where.
        model: The model.
        model_id: Its identity.
        shape: How windows are read.
    """

    def __init__(self, folder: Path, model: Any, model_id: str, shape: Shape) -> None:
        self.folder, self.model, self.model_id, self.shape = folder, model, model_id, shape

    def get(self, windows: mx.array) -> Full:
        """Read what is there for windows [B, context + scored], compute and keep what is not."""
        paths = [self._path(window) for window in numbers(windows)]
        missing = [i for i, path in enumerate(paths) if not path.exists()]
        if missing:
            self._keep(full_cache(self.model, windows[mx.array(missing)], self.shape), [paths[i] for i in missing])
        loaded: list[Any] = [mx.load(str(path)) for path in paths]
        full = Full(*(mx.stack([one[name] for one in loaded]) for name in Full._fields))
        mx.eval(full)
        return full

    def _path(self, window: list[int]) -> Path:
        return self.folder / f"{identity(self.model_id, window, self.shape.context)}.safetensors"

    def _keep(self, full: Full, paths: list[Path]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for i, path in enumerate(paths):
            part = path.with_name("part-" + path.name)
            mx.save_safetensors(str(part), {name: value[i] for name, value in full._asdict().items()})
            part.replace(path)


def bounded_cache(model: Any, caches: list[Any], windows: mx.array, shape: Shape, full: Full) -> list[dict[str, Any]]:
    """Measure one method on windows [B, context + scored]: a row of figures for each."""
    totals = [mx.zeros(len(windows)) for _ in range(3)]
    logits = read_prompt(model, caches, windows[:, : shape.context], shape.prefill_step_size)
    for i in range(shape.scored):
        target = windows[:, shape.context + i]
        found = _compared(logits, target, full.logprobs[:, i], full.best[:, i])
        totals = [total + one for total, one in zip(totals, found, strict=True)]
        mx.eval(totals)
        if i + 1 < shape.scored:
            logits = model(target[:, None], cache=caches)[:, -1]
    loss, agreement, kl = (numbers(total / shape.scored) for total in totals)
    full_loss, held = numbers(full.losses.mean(axis=1)), sizes(caches, len(windows))
    return [
        {"loss": a, "full_loss": b, "above_full": a - b, "agreement": c, "kl": d, **held}
        for a, b, c, d in zip(loss, full_loss, agreement, kl, strict=True)
    ]


def _compared(
    logits: mx.array, target: mx.array, full: mx.array, best: mx.array
) -> tuple[mx.array, mx.array, mx.array]:
    """Loss, agreement with the full cache's choice, and KL(full || this), each [B]."""
    logprobs = log_probabilities(logits)
    loss = -mx.take_along_axis(logprobs, target[:, None], axis=-1)[:, 0]
    agreement = (mx.argmax(logits, axis=-1) == best).astype(mx.float32)
    # Rounded to float16 they no longer sum to 1, and KL would be off by that.
    full = log_probabilities(full)
    kl = (mx.exp(full) * (full - logprobs)).sum(axis=-1)
    return loss, agreement, kl


class Unit(NamedTuple):
    """What is run in one go: a variant on a batch of windows of one text."""

    text: str
    run: str
    first: int  # number of the first window
    windows: mx.array
    variant: Variant

    def identities(self) -> list[dict[str, Any]]:
        """The identifying columns of its rows."""
        start = {"run": self.run, "text": self.text, **self.variant.columns}
        return [start | {"window": self.first + i} for i in range(len(self.windows))]


def run_of(model_id: str, text: str, windows: mx.array, shape: Shape) -> str:
    """Identify what rows must have in common: model, text, and how it is read; not how many windows."""
    return identity(model_id, text, numbers(windows[0]), shape.context, shape.scored, shape.prefill_step_size)


def units(
    texts: dict[str, mx.array], runs: dict[str, str], variants: Sequence[Variant], shape: Shape
) -> Iterator[Unit]:
    """List everything to run, the variants of one batch after another."""
    for text, windows in texts.items():
        for first in range(0, len(windows), shape.batch):
            for variant in variants:
                yield Unit(text, runs[text], first, windows[first : first + shape.batch], variant)


def measure(
    model: Any, todo: Sequence[Unit], rows: Rows, store: FullStore, done: Callable[[], object] = lambda: None
) -> None:
    """Run what has no rows yet; the rows of a unit are written as soon as it is through.

    Args:
        model: The model.
        todo: From ``units``.
        rows: Where rows go.
        store: The full cache's outcomes.
        done: Called after each unit.
    """

    def figures(unit: Unit, full: Full) -> list[dict[str, Any]]:
        return bounded_cache(model, unit.variant.caches(model), unit.windows, store.shape, full)

    run_units(todo, rows, lambda unit: store.get(unit.windows), figures, done)


def run_units(
    todo: Sequence[Any],
    rows: Rows,
    read: Callable[[Any], Any],
    figures: Callable[[Any, Any], list[dict[str, Any]]],
    done: Callable[[], object],
) -> None:
    """Run what has no rows yet, one batch of windows after another.

    Args:
        todo: Units with ``run``, ``first`` and ``identities``; those of one batch follow one another.
        rows: Where rows go, as soon as a unit is through.
        read: Makes of a unit what all units of its batch need.
        figures: Measures a unit with that: a row for each of its identities.
        done: Called after each unit.
    """
    batch, ready = None, None
    for unit in todo:
        keys = unit.identities()
        if not all(key in rows for key in keys):
            if ready is None or batch != (unit.run, unit.first):
                ready = None  # or two would be in memory
                batch, ready = (unit.run, unit.first), read(unit)
            rows.append(key | row for key, row in zip(keys, figures(unit, ready), strict=True))
        done()
