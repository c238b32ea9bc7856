"""Draw a comparison: mass retained over time, and which positions were kept when. Needs matplotlib."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlx.core as mx

from h2o_core.simulation import Trace

_MOST = 1024  # cells of a map along an axis: more can't be told apart in a picture
_COLUMNS = 4  # maps side by side
_LINES = ("-", "--", ":")
_SMOOTH = 16  # steps that a point of the curves is the mean of


def check(path: str) -> None:
    """Say before anything is replayed that a picture can't be drawn.

    Raises:
        ValueError: matplotlib is not installed, or the name is no picture's.
    """
    if find_spec("matplotlib") is None:
        raise ValueError('--plot needs matplotlib: pip install "h2o-core[plot]"')
    if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot draws .png, .svg or .pdf, got {path}")


def draw(path: str, traces: Mapping[str, Trace]) -> None:
    """Draw the traces of one attention, by name: curves above, and below a map of kept positions each, in rows."""
    from matplotlib.figure import Figure

    columns = min(len(traces), _COLUMNS)
    rows = -(-len(traces) // columns)
    places = [f"map {i}" if i < len(traces) else "." for i in range(rows * columns)]
    maps = [places[i * columns : (i + 1) * columns] for i in range(rows)]
    figure = Figure(figsize=(max(9, 3 * columns), 3.5 + 3 * rows), layout="constrained")
    axes = figure.subplot_mosaic([["mass"] * columns, *maps], height_ratios=[3.5, *[3] * rows])
    for i, (name, trace) in enumerate(traces.items()):
        # Ten colours are told apart, then the line changes.
        axes["mass"].plot(*smoothed(trace), label=name, color=f"C{i % 10}", linestyle=_LINES[i // 10 % len(_LINES)])
        below, steps = axes[f"map {i}"], trace.retained.shape[-2]
        below.imshow(map_of(trace), origin="lower", extent=(0, steps, 0, steps), cmap="Blues", vmin=0, vmax=1)
        below.set_title(name, fontsize="small")
        below.set(xlabel="position", ylabel="" if i % columns else "step")
    axes["mass"].set(xlabel="step", ylabel="mass retained", ylim=(None, 1.02))
    axes["mass"].legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(path)


def smoothed(trace: Trace) -> tuple[list[int], list[float]]:
    """Steps, and the mean mass retained over heads and the steps around."""
    retained = trace.retained.reshape(-1, *trace.retained.shape[-2:]).mean(axis=(0, 2))
    size = max(1, min(_SMOOTH, retained.size // 8))
    whole = retained.size - retained.size % size
    values: Any = retained[:whole].reshape(-1, size).mean(axis=-1).tolist()
    return list(range(size // 2, whole, size)), values


def map_of(trace: Trace) -> list[list[float]]:
    """Share of heads that keep each position (right) after each step (up), thinned out to what a picture shows."""
    if trace.kept is None:
        raise ValueError("a map needs a trace with kept positions")
    kept = trace.kept.reshape(-1, *trace.kept.shape[-3:]).swapaxes(0, 1).flatten(1, 2)
    n_steps, n_heads = kept.shape[:2]
    every = -(-n_steps // _MOST)
    rows: list[Any] = []
    for step in range(0, n_steps, every):
        held = kept[step].flatten()
        counts = mx.zeros((n_steps,)).at[mx.maximum(held, 0)].add(mx.where(held >= 0, 1.0, 0.0))
        rows.append((counts[::every] / n_heads).tolist())
    return rows
