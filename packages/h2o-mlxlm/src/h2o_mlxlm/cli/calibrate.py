"""``h2o-mlxlm calibrate``: which KV heads of a model need room, for budgets that differ from head to head.

One head at a time is bounded, while all others keep everything, and the model's distribution is compared with that of
the full cache. Every measurement goes into rows.csv in --out as soon as it is made, and the same command again takes up
where it was interrupted; at the end needs.json there has what load_needs reads.
"""

import argparse
from pathlib import Path
from typing import Any

from h2o_core import H2OConfig
from h2o_mlxlm.cli import evaluate, flags
from h2o_mlxlm.cli.loading import loaded

_COUNT = flags.number(1, 2**31 - 1, int)
N_SHOWN = 10  # heads
MEANS = (64, 128, 256)  # budgets that the table shows


def add_to(commands: Any) -> None:
    """Add the command and its flags."""
    parser = commands.add_parser("calibrate", help="Measure which heads need room", description=__doc__)
    add = parser.add_argument
    add("--model", help="Hub id, folder or .gguf file; the installed small model if not given")
    add("--out", required=True, metavar="DIR", help="Folder of rows.csv and needs.json")
    add("--text", nargs="+", default=[], metavar="FILE", help="Texts; those of the package if not given")
    add("--budgets", type=_COUNT, nargs="+", default=[32, 128, 512], help="Tokens kept, two or more (%(default)s)")
    add("--context", type=_COUNT, default=1024, help="Tokens before the scored ones (%(default)s)")
    add("--scored", type=_COUNT, default=256, help="Tokens scored in each window (%(default)s)")
    add("--windows", type=_COUNT, default=2, help="Windows of each text (%(default)s)")
    add("--batch", type=_COUNT, default=2, help="Windows that run as one batch (%(default)s)")
    add("--prefill-step-size", type=_COUNT, default=2048, help="Prompt tokens a call (%(default)s)")
    parser.set_defaults(run=run, verbose=True)


def run(args: argparse.Namespace) -> int:
    """Measure every head and write what was found."""
    budgets = _budgets(args)
    from h2o_mlxlm.evaluation import calibration, loss, windows
    from h2o_mlxlm.identity import needs_identity
    from h2o_mlxlm.needs import save_needs

    texts = windows.read_texts(args.text)
    rows = evaluate.rows_of(args, calibration)
    model, tokenizer = loaded(args.model)
    heads, model_id = calibration.heads_of(model), needs_identity(model)
    about = evaluate.circumstances_of(args, model)
    shape = loss.Shape(args.context, args.scored, args.batch, args.prefill_step_size)
    length = args.context + args.scored
    tokens = {name: windows.windows(tokenizer, name, text, args.windows, length) for name, text in texts.items()}
    runs = {name: calibration.run_of(about["model"], texts[name], tokens[name], shape) for name in texts}
    todo = list(calibration.units(tokens, runs, heads, budgets, shape))
    with evaluate.bar_of(todo, "head") as bar:
        calibration.measure(model, todo, rows, shape, bar.update)
    needs = calibration.needs_of(model_id, todo, rows)
    save_needs(Path(args.out) / "needs.json", needs, about | {"texts": windows.checksums(texts)})
    print(table_of(needs))
    return 0


def _budgets(args: argparse.Namespace) -> list[int]:
    """Read the budgets; those that no cache can have are refused here, before a model is loaded.

    Raises:
        ValueError: There are fewer than two, or one is too small, or too large for the context.
    """
    budgets = sorted(set(args.budgets))
    if len(budgets) < 2:
        raise ValueError(f"--budgets: what a budget between them costs is read off two or more, got {budgets[0]} alone")
    H2OConfig(budget=budgets[0])
    if budgets[-1] >= args.context:
        raise ValueError(
            f"--budgets: of {args.context} tokens of context {budgets[-1]} lose none before the scored ones: give "
            f"budgets below {args.context}, or more --context"
        )
    return budgets


def table_of(needs: Any) -> str:
    """Show the heads that need most, what they make up, and what they would get."""
    from h2o_mlxlm.evaluation.results import table

    middle = len(needs.budgets) // 2
    given = [needs.budgets_for(mean) for mean in MEANS]
    heads = [
        (head[middle], layer, place, [budgets[layer][place] for budgets in given])
        for layer, of_layer in enumerate(needs.losses)
        for place, head in enumerate(of_layer)
    ]
    heads.sort(key=lambda head: (-head[0], *head[1:3]))
    top, others = heads[:N_SHOWN], heads[N_SHOWN:]
    lines = [[f"layer {layer}, head {place}", _percent([loss]), *map(str, own)] for loss, layer, place, own in top]
    lines.append([f"these {len(top)}", _percent([head[0] for head in top]), *_means(top)])
    if others:
        lines.append([f"the other {len(others)}", _percent([head[0] for head in others]), *_means(others)])
    return table(["needs most room", "share", *(f"budget {mean}" for mean in MEANS)], lines)


def _percent(shares: list[float]) -> str:
    return f"{100 * sum(shares):.1f} %"


def _means(heads: list[Any]) -> list[str]:
    """The mean budget of these heads, at each of ``MEANS``."""
    return [f"{sum(column) / len(heads):.0f}" for column in zip(*[head[3] for head in heads], strict=True)]
