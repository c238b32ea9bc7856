"""A pass key hidden in a long message: is it still there when the question comes, at the end?"""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import mlx.core as mx

from h2o_mlxlm.evaluation.methods import FULL, Variant
from h2o_mlxlm.evaluation.passes import chooser, continued, numbers, sizes
from h2o_mlxlm.evaluation.results import Rows, table
from h2o_mlxlm.identity import identity

COLUMNS = (
    *("run", "form", "depth", "length", "trial", "method", "budget", "settings", "config", "seed", "label"),
    *("key", "answer", "found", "cache_bytes", "tokens_kept"),
)
KEY = COLUMNS[:11]

FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
INTRODUCTION = "A pass key is hidden in the text below. Find it and remember it.\n\n"
NEEDLE = "\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n"
QUESTION = "\n\nWhat is the pass key? Answer with its five digits."
MARK = "@@MESSAGE@@"


class Row(NamedTuple):
    """A prompt and the key that is in it."""

    key: str
    tokens: list[int]


class Cell(NamedTuple):
    """Trials with different keys that are otherwise alike, of equal length: a batch."""

    form: str
    depth: float
    length: int
    rows: tuple[Row, ...]


def make_cell(
    tokenizer: Any, form: str, text: str, depth: float, length: int, n_trials: int = 4, seed: int = 0
) -> Cell:
    """Hide keys in a text.

    Pieces are put together as tokens, so that each prompt has exactly the length asked for. The key goes to
    the sentence end that is nearest to the depth.

    Args:
        tokenizer: The model's.
        form: The text's name.
        text: What the key is hidden in; repeated if it is short.
        depth: Where: 0 the beginning, 1 the end.
        length: Tokens of the prompt, chat template included.
        n_trials: Keys.
        seed: Of the keys.

    Raises:
        ValueError: The length leaves no room for text.
    """
    head, tail = _frame(tokenizer)
    keys = _keys(tokenizer, n_trials, seed)
    needles = [_encode(tokenizer, NEEDLE.format(key=key)) for key in keys]
    room = length - len(head) - len(tail) - len(needles[0])
    if room < 1:
        raise ValueError(
            f"--lengths: a prompt of {length} tokens has no room for text, it takes {length - room} without"
        )
    around = _encode(tokenizer, text)
    around = (around * (room // len(around) + 1))[:room]
    place = _sentence_end(tokenizer, around, depth)
    whole = [head + around[:place] + needle + around[place:] + tail for needle in needles]
    return Cell(form, depth, length, tuple(Row(key, tokens) for key, tokens in zip(keys, whole, strict=True)))


def _encode(tokenizer: Any, text: str) -> list[int]:
    # Not verbose: a text longer than the model reads is cut later.
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """What comes before and after the text: chat template, introduction, question."""
    message = INTRODUCTION + MARK + QUESTION
    if not tokenizer.has_chat_template:
        before, _, after = message.partition(MARK)
        return list(tokenizer.encode(before)), _encode(tokenizer, after + "\n\n")
    messages = [{"role": "user", "content": message}]
    whole = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, _, after = whole.partition(MARK)
    return _encode(tokenizer, before), _encode(tokenizer, after)


def _keys(tokenizer: Any, n_trials: int, seed: int) -> list[str]:
    """Draw keys that take equally many tokens."""
    drawn = random.Random(seed)
    keys: list[str] = []
    while len(keys) < n_trials:
        key = str(drawn.randint(10_000, 99_999))
        lengths = {len(_encode(tokenizer, NEEDLE.format(key=k))) for k in (key, *keys[:1])}
        if len(lengths) == 1 and key not in keys:
            keys.append(key)
    return keys


def _sentence_end(tokenizer: Any, tokens: list[int], depth: float) -> int:
    wanted = depth * len(tokens)
    ends = [i + 1 for i, token in enumerate(tokens) if tokenizer.decode([token]).rstrip().endswith((".", "!", "?"))]
    return min([0, *ends], key=lambda end: abs(end - wanted)) if ends else round(wanted)


class Unit(NamedTuple):
    """What is run in one go: a variant on a cell."""

    cell: Cell
    runs: tuple[str, ...]
    variant: Variant

    def identities(self) -> list[dict[str, Any]]:
        """The identifying columns of its rows."""
        cell = {"form": self.cell.form, "depth": self.cell.depth, "length": self.cell.length}
        return [{"run": run, "trial": i, **cell, **self.variant.columns} for i, run in enumerate(self.runs)]


def units(
    cells: Sequence[Cell], variants: Sequence[Variant], model_id: str, n_tokens: int, prefill_step_size: int
) -> Iterator[Unit]:
    """List everything to run, the full cache first in each cell."""
    others = [v for v in variants if v.method != FULL]
    full = Variant(FULL, label=variants[0].label if variants else "")
    for cell in cells:
        runs = tuple(identity(model_id, row.tokens, n_tokens, prefill_step_size) for row in cell.rows)
        for variant in (full, *others):
            yield Unit(cell, runs, variant)


def measure(
    model: Any,
    tokenizer: Any,
    todo: Sequence[Unit],
    n_tokens: int,
    prefill_step_size: int,
    rows: Rows,
    done: Callable[[], object] = lambda: None,
) -> None:
    """Run what has no rows yet; cells in which the full cache finds no key are left to it."""
    found: dict[str, int] = {row["run"]: int(row["found"]) for row in rows if row["method"] == FULL}
    for unit in todo:
        keys = unit.identities()
        counts = unit.variant.method == FULL or any(found[run] for run in unit.runs)
        if counts and not all(key in rows for key in keys):
            caches = unit.variant.caches(model)
            answers = _answers(model, tokenizer, caches, unit.cell, n_tokens, prefill_step_size)
            held = sizes(caches, len(answers))
            outcomes: list[dict[str, Any]] = [
                {"key": row.key, "answer": answer, "found": int(row.key in answer), **held}
                for row, answer in zip(unit.cell.rows, answers, strict=True)
            ]
            rows.append(key | outcome for key, outcome in zip(keys, outcomes, strict=True))
            if unit.variant.method == FULL:
                found |= {run: outcome["found"] for run, outcome in zip(unit.runs, outcomes, strict=True)}
        done()


def _answers(
    model: Any, tokenizer: Any, caches: list[Any], cell: Cell, n_tokens: int, prefill_step_size: int
) -> list[str]:
    prompts = mx.array([row.tokens for row in cell.rows], mx.int32)
    steps = list(continued(model, caches, prompts, n_tokens, chooser(0, 0), prefill_step_size))
    return [tokenizer.decode(row) for row in numbers(mx.stack(steps, axis=1))]


def summarise(rows: Rows, todo: Sequence[Unit]) -> list[dict[str, Any]]:
    """Count, for each variant and cell, the keys found among those that the full cache finds."""
    full = {row["run"]: int(row["found"]) for row in rows if row["method"] == FULL}
    entries: dict[Variant, dict[str, Any]] = {}
    for unit in todo:
        counted = [int(rows.find(key)["found"]) for key in unit.identities() if full[key["run"]]]
        entry = entries.setdefault(
            unit.variant,
            {name: getattr(unit.variant, name) for name in ("method", "budget", "settings", "label", "seed", "name")}
            | {"cells": []},
        )
        trials = len(unit.runs) if unit.variant.method == FULL else len(counted)
        cell = {"form": unit.cell.form, "depth": unit.cell.depth, "length": unit.cell.length}
        entry["cells"].append(cell | {"found": sum(counted), "trials": trials})
    return list(entries.values())


def heat_maps(entries: list[dict[str, Any]]) -> str:
    """Write found/trials of each variant, depth by length; "-" where the full cache finds no key either."""
    parts = []
    for entry in entries:
        for form in dict.fromkeys(cell["form"] for cell in entry["cells"]):
            cells = {(c["depth"], c["length"]): c for c in entry["cells"] if c["form"] == form}
            lengths = sorted({length for _, length in cells})
            lines = [
                [f"{depth:g}", *(_cell(cells.get((depth, length))) for length in lengths)]
                for depth in sorted({depth for depth, _ in cells})
            ]
            found, trials = (sum(c[name] for c in cells.values()) for name in ("found", "trials"))
            budget = f", budget {entry['budget']}" if entry["budget"] else ""
            title = f"{entry['name']}{budget}, {form}: {found} of {trials}"
            parts.append(title + "\n" + table(["depth", *map(str, lengths)], lines))
    return "\n\n".join(parts)


def _cell(cell: dict[str, Any] | None) -> str:
    return f"{cell['found']}/{cell['trials']}" if cell is not None and cell["trials"] else "-"
