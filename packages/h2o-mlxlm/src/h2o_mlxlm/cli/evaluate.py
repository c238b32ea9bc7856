"""``h2o-mlxlm eval``: what a bounded cache costs in quality, against the full cache.

Every measurement goes into --out as soon as it is made. The same command again takes up where it was
interrupted, and more methods, budgets or windows add to what is there.
"""

import argparse
from pathlib import Path
from typing import Any

from h2o_mlxlm.cli import flags
from h2o_mlxlm.cli.loading import loaded

_BIG = 2**31 - 1
_COUNT = flags.number(1, _BIG, int)


def add_to(commands: Any) -> None:
    """Add the command and its kinds."""
    parser = commands.add_parser("eval", help="Measure quality", description=__doc__)
    kinds = parser.add_subparsers(required=True, metavar="KIND", parser_class=flags.Parser)
    _add_loss(kinds)
    _add_generation(kinds)
    _add_retrieval(kinds)


def _add_loss(kinds: Any) -> None:
    parser = kinds.add_parser(
        "loss", help="Loss above the full cache's", description="Loss of each method above the full cache's."
    )
    _add_common(parser, methods=["recency", "h2o"], budgets=[64, 128, 256])
    add = parser.add_argument
    add("--text", nargs="+", default=[], metavar="FILE", help="Texts; those of the package if not given")
    add("--context", type=_COUNT, default=1024, help="Tokens before the scored ones (%(default)s)")
    add("--scored", type=_COUNT, default=128, help="Tokens scored in each window (%(default)s)")
    add("--windows", type=_COUNT, default=16, help="Windows of each text (%(default)s)")
    add("--batch", type=_COUNT, default=16, help="Windows that run as one batch (%(default)s)")
    parser.set_defaults(run=run_loss)


def _add_generation(kinds: Any) -> None:
    parser = kinds.add_parser(
        "generation", help="Free text that goes on", description="How much free text repeats itself; it never ends."
    )
    _add_common(parser, methods=["full", "recency", "h2o"], budgets=[64])
    add = parser.add_argument
    add("--prompts", metavar="FILE", help="Prompts, one a line; the package's twenty if not given")
    add("--n-prompts", type=_COUNT, help="The first so many of them (all)")
    add("--tokens", type=_COUNT, default=2000, help="Tokens of each text (%(default)s)")
    add("--temp", type=flags.number(0, float("inf")), default=0.0, help="Sampling temperature (%(default)s)")
    add("--batch", type=_COUNT, default=20, help="Texts that run as one batch (%(default)s)")
    parser.set_defaults(run=run_generation)


def _add_retrieval(kinds: Any) -> None:
    parser = kinds.add_parser(
        "retrieval", help="A pass key in a long text", description="Whether a pass key in a long text is found."
    )
    both = ["evict_during_prefill=true", "evict_during_prefill=false"]
    _add_common(parser, methods=["recency", "h2o"], budgets=[128], settings=both)
    add = parser.add_argument
    add("--forms", nargs="+", choices=["filler", "prose"], default=["filler", "prose"], help="What it is hidden in")
    add("--text", metavar="FILE", help="The prose; the package's if not given")
    depth = flags.number(0, 1)
    add("--depths", type=depth, nargs="+", default=[0.1, 0.5, 0.9], help="Where: 0 beginning, 1 end (%(default)s)")
    add("--lengths", type=_COUNT, nargs="+", default=[256, 512, 1024], help="Tokens of the prompt (%(default)s)")
    add("--trials", type=_COUNT, default=4, help="Keys of each cell, one batch (%(default)s)")
    add("--tokens", type=_COUNT, default=16, help="Tokens in which the key must come (%(default)s)")
    add("--key-seed", type=flags.number(0, _BIG, int), default=0, help="Of the keys (%(default)s)")
    # Small calls, or evict_during_prefill would change nothing in a prompt that is one call.
    parser.set_defaults(run=run_retrieval, prefill_step_size=256)


def _add_common(
    parser: argparse.ArgumentParser, methods: list[str], budgets: list[int], settings: list[str] | None = None
) -> None:
    add = parser.add_argument
    add("--model", help="Hub id, folder or .gguf file; the installed small model if not given")
    add("--out", required=True, metavar="DIR", help="Folder of rows.csv and summary.json")
    add_methods(parser, methods, settings)
    # Above the tokens that recency never lets go.
    add("--budgets", type=flags.number(5, 2**30, int), nargs="+", default=budgets, help="Tokens kept (%(default)s)")
    seed = flags.number(0, _BIG, int)
    add("--seeds", type=seed, nargs="+", default=[0], help="Of methods that draw lots, and of sampling (%(default)s)")
    add("--label", default="", help="Tells these rows from others of the same settings")
    add("--prefill-step-size", type=_COUNT, default=2048, help="Prompt tokens a call (%(default)s)")
    parser.set_defaults(verbose=True)


def add_methods(parser: argparse.ArgumentParser, methods: list[str], settings: list[str] | None = None) -> None:
    """Add the flags that say what is measured."""
    add = parser.add_argument
    add(
        "--methods",
        nargs="+",
        default=methods,
        help="full, recency, h2o, calibrated, calibrated-layers (or 'calibrated FILE', which calibrate wrote), "
        "random, …, a scorer such as 'snapkv window=16', or package.module:function of (model, budget) (%(default)s)",
    )
    add(
        "--settings",
        nargs="+",
        action="extend",
        metavar="'FIELD=VALUE …'",
        help="Fields of H2OConfig, such as 'grace=16 decay=1.0': one variant for each text",
    )
    parser.set_defaults(default_settings=settings or [""])


def run_loss(args: argparse.Namespace) -> int:
    """Measure loss."""
    variants = chosen_variants(args, args.budgets, args.seeds)
    from h2o_mlxlm.evaluation import loss, summary, windows

    texts = windows.read_texts(args.text)
    rows = rows_of(args, loss)
    model, tokenizer = loaded(args.model)
    check_caches(model, variants)
    about = circumstances_of(args, model)
    shape = loss.Shape(args.context, args.scored, args.batch, args.prefill_step_size)
    length = args.context + args.scored
    tokens = {name: windows.windows(tokenizer, name, text, args.windows, length) for name, text in texts.items()}
    runs = {name: loss.run_of(about["model"], texts[name], tokens[name], shape) for name in texts}
    todo = list(loss.units(tokens, runs, variants, shape))
    store = loss.FullStore(Path(args.out) / "full", model, about["model"], shape)
    with bar_of(todo, "batch") as bar:
        loss.measure(model, todo, rows, store, bar.update)
    entries = summary.summarise(summary.gathered(rows, runs, args.windows))
    about |= {"texts": windows.checksums(texts)}
    return _finish(args, about, entries, summary.loss_tables(entries))


def run_generation(args: argparse.Namespace) -> int:
    """Generate texts and measure their variety."""
    variants = chosen_variants(args, args.budgets, args.seeds, sampled=args.temp > 0)
    from h2o_mlxlm.evaluation import generation
    from h2o_mlxlm.evaluation.passes import templated
    from h2o_mlxlm.evaluation.prompts import PROMPTS

    texts = Path(args.prompts).read_text(encoding="utf-8").splitlines() if args.prompts else list(PROMPTS)
    texts = [text for text in texts if text.strip()][: args.n_prompts]
    if not texts:
        raise ValueError(f"--prompts: {args.prompts} has no prompt, which is a line that is not empty")
    rows = rows_of(args, generation)
    model, tokenizer = loaded(args.model)
    check_caches(model, variants)
    about = circumstances_of(args, model)
    manner = generation.Manner(args.tokens, args.temp, args.batch, args.prefill_step_size)
    todo = list(generation.units([templated(tokenizer, t) for t in texts], variants, about["model"], manner))
    with bar_of(todo, "batch") as bar:
        generation.measure(model, tokenizer, todo, manner, rows, Path(args.out) / "texts", bar.update)
    entries = generation.summarise(rows, todo)
    return _finish(args, about, entries, generation.generation_table(entries))


def run_retrieval(args: argparse.Namespace) -> int:
    """Hide pass keys and ask for them."""
    variants = chosen_variants(args, args.budgets, args.seeds)
    from h2o_mlxlm.evaluation import retrieval, windows

    texts = {"filler": retrieval.FILLER}
    if "prose" in args.forms:
        texts["prose"] = _prose(windows.read_texts([args.text] if args.text else []), args.text)
    rows = rows_of(args, retrieval)
    model, tokenizer = loaded(args.model)
    check_caches(model, variants)
    about = circumstances_of(args, model)
    cells = [
        retrieval.make_cell(tokenizer, form, texts[form], depth, length, args.trials, args.key_seed)
        for form in dict.fromkeys(args.forms)
        for length in args.lengths
        for depth in args.depths
    ]
    todo = list(retrieval.units(cells, variants, about["model"], args.tokens, args.prefill_step_size))
    with bar_of(todo, "batch") as bar:
        retrieval.measure(model, tokenizer, todo, args.tokens, args.prefill_step_size, rows, bar.update)
    entries = retrieval.summarise(rows, todo)
    return _finish(args, about, entries, retrieval.heat_maps(entries))


def _prose(texts: dict[str, str], file: str | None) -> str:
    text = next(iter(texts.values())) if file else texts.get("prose", "")
    if not text.strip():
        raise ValueError("there is no prose to hide the key in: name a file with --text, or use --forms filler")
    return text


def chosen_variants(args: argparse.Namespace, budgets: list[int], seeds: list[int], sampled: bool = False) -> list[Any]:
    """List what the flags ask for; bad settings are refused here, before a model is loaded."""
    from h2o_mlxlm.evaluation.methods import variants

    label = getattr(args, "label", "")
    return variants(args.methods, budgets, args.settings or args.default_settings, seeds, label, sampled)


def check_caches(model: Any, variants: list[Any]) -> None:
    """Make every variant's caches once: what this model can't have is refused before anything is measured."""
    for variant in variants:
        variant.caches(model)


def rows_of(args: argparse.Namespace, kind: Any) -> Any:
    """Open the rows of --out, for what a module measures."""
    from h2o_mlxlm.evaluation.results import Rows

    return Rows(Path(args.out) / "rows.csv", kind.COLUMNS, kind.KEY)


def circumstances_of(args: argparse.Namespace, model: Any) -> dict[str, Any]:
    """Say on what, where, with what and by which flags something is measured."""
    from h2o_mlxlm.circumstances import circumstances
    from h2o_mlxlm.identity import model_identity

    asked = {name: value for name, value in vars(args).items() if isinstance(value, (str, int, float, list))}
    packages = ("mlx", "mlx-lm", "h2o-core", "h2o-mlxlm")
    return {"model": model_identity(model), **circumstances(packages), "asked": asked}


def bar_of(todo: list[Any], unit: str) -> Any:
    """Begin a bar of what is done."""
    from tqdm import tqdm

    return tqdm(total=len(todo), unit=unit, disable=None)  # None: only on a terminal


def _finish(args: argparse.Namespace, about: dict[str, Any], entries: list[dict[str, Any]], text: str) -> int:
    from h2o_mlxlm.evaluation.results import write_json

    write_json(Path(args.out) / "summary.json", about | {"results": entries})
    print(text)
    return 0
