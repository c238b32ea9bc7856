"""Free text far past the budget, and how much it repeats itself, beside the full cache's."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx

from h2o_mlxlm.evaluation.bootstrap import mean
from h2o_mlxlm.evaluation.methods import Variant
from h2o_mlxlm.evaluation.passes import chooser, continued, numbers, sizes
from h2o_mlxlm.evaluation.results import Rows, table
from h2o_mlxlm.evaluation.variety import collapses, distinct, least_variety, longest_run, loops
from h2o_mlxlm.identity import identity

COLUMNS = (
    *("run", "prompt", "method", "budget", "settings", "config", "seed", "label"),
    *("prompt_tokens", "tokens", "least_variety", "distinct_1", "distinct_2", "distinct_3", "distinct_4"),
    *("longest_run", "collapse", "loop", "cache_bytes", "tokens_kept"),
)
KEY = COLUMNS[:8]


class Manner(NamedTuple):
    """How text is generated."""

    tokens: int = 2000
    temp: float = 0.0
    batch: int = 20
    prefill_step_size: int = 2048


class Unit(NamedTuple):
    """What is run in one go: a variant on prompts of equal length."""

    numbers: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]
    runs: tuple[str, ...]
    variant: Variant

    def identities(self) -> list[dict[str, Any]]:
        """The identifying columns of its rows."""
        return [
            {"run": run, "prompt": n, **self.variant.columns} for n, run in zip(self.numbers, self.runs, strict=True)
        ]


def units(prompts: Sequence[list[int]], variants: Sequence[Variant], model_id: str, manner: Manner) -> Iterator[Unit]:
    """List everything to run; caches take rows of equal length alone, so prompts are grouped by theirs."""
    groups: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        groups.setdefault(len(prompt), []).append(number)
    batches = [g[i : i + manner.batch] for g in groups.values() for i in range(0, len(g), manner.batch)]
    for batch in batches:
        chosen = tuple(tuple(prompts[n]) for n in batch)
        # Drawn lots depend on a row's place in its batch.
        shared = chosen if manner.temp else None
        common = (model_id, shared, manner.tokens, manner.temp, manner.prefill_step_size)
        runs = tuple(identity(prompt, *common) for prompt in chosen)
        for variant in variants:
            yield Unit(tuple(batch), chosen, runs, variant)


def measures(tokens: Sequence[int], first_eviction: int) -> dict[str, Any]:
    """Say how much a text repeats itself; ``collapse`` and ``loop`` from the first eviction on."""
    return {
        "tokens": len(tokens),
        "least_variety": least_variety(tokens),
        **{f"distinct_{n}": distinct(tokens, n) for n in (1, 2, 3, 4)},
        "longest_run": longest_run(tokens),
        "collapse": int(collapses(tokens, first_eviction)),
        "loop": int(loops(tokens, first_eviction)),
    }


def measure(
    model: Any,
    tokenizer: Any,
    todo: Sequence[Unit],
    manner: Manner,
    rows: Rows,
    folder: Path,
    done: Callable[[], object] = lambda: None,
) -> None:
    """Run what has no rows yet; texts go into ``folder``."""
    for unit in todo:
        keys = unit.identities()
        if not all(key in rows for key in keys):
            caches = unit.variant.caches(model)
            texts = _texts(model, tokenizer, caches, unit, manner)
            held = sizes(caches, len(texts))
            length = len(unit.prompts[0])
            start = max(0, unit.variant.budget - length)
            _write_texts(folder, tokenizer, unit, texts)
            rows.append(
                key | {"prompt_tokens": length} | measures(text, start) | held
                for key, text in zip(keys, texts, strict=True)
            )
        done()


def _texts(model: Any, tokenizer: Any, caches: list[Any], unit: Unit, manner: Manner) -> Any:
    choose = chooser(manner.temp, unit.variant.seed, sorted(tokenizer.eos_token_ids))
    prompts = mx.array(unit.prompts, mx.int32)
    steps = list(continued(model, caches, prompts, manner.tokens, choose, manner.prefill_step_size))
    return numbers(mx.stack(steps, axis=1))


def _write_texts(folder: Path, tokenizer: Any, unit: Unit, texts: list[list[int]]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for number, text in zip(unit.numbers, texts, strict=True):
        (folder / text_name(unit.variant, number)).write_text(tokenizer.decode(text) + "\n", encoding="utf-8")


def text_name(variant: Variant, number: int) -> str:
    """Name a text's file: ``h2o-64-03.txt``, with settings, seed and label in between where there are any."""
    seed = f"seed={variant.seed}" if variant.seed else ""
    parts = [variant.method, str(variant.budget), variant.settings, seed, variant.label, f"{number:02}"]
    return "-".join(re.sub(r"[^\w.=]+", "_", part) for part in parts if part) + ".txt"


def summarise(rows: Rows, todo: Sequence[Unit]) -> list[dict[str, Any]]:
    """Make one entry for each variant: means over prompts and seeds."""
    wanted: dict[Variant, list[dict[str, str]]] = {}
    for unit in todo:
        wanted.setdefault(replace(unit.variant, seed=0), []).extend(rows.find(key) for key in unit.identities())
    return [_entry(variant, found) for variant, found in wanted.items()]


def _entry(variant: Variant, found: list[dict[str, str]]) -> dict[str, Any]:
    def column(name: str) -> list[float]:
        return [float(row[name]) for row in found]

    names = ("method", "budget", "settings", "label", "name")
    return {
        **{name: getattr(variant, name) for name in names},
        "texts": len(found),
        "collapsed": int(sum(column("collapse"))),
        "looped": int(sum(column("loop"))),
        "longest_run": int(max(column("longest_run"))),
        **{m: mean(column(m)) for m in ("least_variety", "distinct_1", "distinct_2", "distinct_3", "distinct_4")},
        "tokens_kept": int(max(column("tokens_kept"))),
        "cache_bytes": mean(column("cache_bytes")),
    }


def generation_table(entries: list[dict[str, Any]]) -> str:
    """Write the summary as a table."""
    header = ["texts", "budget", "n", "collapsed", "looped", "longest run", "least variety"]
    lines = [
        [
            e["name"],
            str(e["budget"] or "-"),
            *(str(e[name]) for name in ("texts", "collapsed", "looped", "longest_run")),
            f"{e['least_variety']:.2f}",
            *(f"{e[f'distinct_{n}']:.2f}" for n in (1, 2, 3, 4)),
        ]
        for e in entries
    ]
    return table([*header, *(f"distinct {n}" for n in (1, 2, 3, 4))], lines)
