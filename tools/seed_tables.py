"""The tables of the document this project started from (VeloxQuant-MLX, "H2O-adapted"), done again with ours.

    uv run tools/seed_tables.py > docs/results/seed.md

The seed measured Llama-3.2-1B and Mistral-7B on Metal; this is the installed SmolLM2-135M-Instruct, so texts can't
be compared word by word. What can: whether the kept set freezes, how far it moves, and whether text falls apart.
Text is greedy and never ends. ``--only 1 --tokens 20`` is a quick try.
"""

import argparse
import platform
import sys
import time
from datetime import date
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import h2o_mlxlm
from h2o_mlxlm import H2OConfig

PROSE = Path(__file__).parent / "tuning_texts" / "prose.txt"
SHORT = "What is the capital of France? Answer in one word."
PHOTOSYNTHESIS = "Explain photosynthesis, step by step, and where each step occurs in the cell."
NO_EVICTION = 10_000
STUCK = 16  # tokens


class Row(NamedTuple):
    """A cell of a table: what runs, and what the seed saw there."""

    prompt: str
    budget: int
    n_sink: int = 0
    grace: int = 0
    decay: float = 1.0
    queries: str = "true"
    seed: str = ""
    note: str = ""

    def config(self):
        """Build the cache's configuration; ``long_share`` is 0, for the seed had none."""
        fields = ("budget", "n_sink", "grace", "decay", "queries")
        return H2OConfig(**{name: getattr(self, name) for name in fields}, long_share=0.0)


class Defaults(NamedTuple):
    """A cell with today's defaults; without grace where the default does not fit."""

    prompt: str
    budget: int
    seed: str = ""

    def config(self):
        """Build the cache's configuration."""
        try:
            return H2OConfig(budget=self.budget)
        except ValueError:
            return H2OConfig(budget=self.budget, grace=0)

    @property
    def note(self):
        """Say what was changed to fit."""
        try:
            H2OConfig(budget=self.budget)
        except ValueError:
            return "defaults, but grace 0: theirs does not fit"
        return "defaults"


class Section(NamedTuple):
    """A table."""

    title: str
    about: str
    tokens: int
    rows: list


def grid(prompt, budget, n_sink, graces, decays, seed):
    """Every combination; the seed's words go to the key they have in ``seed``."""
    return [Row(prompt, budget, n_sink, g, d, seed=seed.get((g, d), "")) for g in graces for d in decays]


SECTIONS = [
    Section(
        "1. A budget just above the prompt, grace 0",
        "The seed: Llama-3.2-1B, n_sink 0, a prompt of 13 tokens (here 12), 40 tokens generated; long prompts of 64 "
        "and, on Mistral-7B, 72 tokens. Kept after 43 steps: exactly [0..13], no generated token ever.",
        40,
        [
            Row("short", NO_EVICTION, seed="baseline: repeats its question (a model quirk)", note="no eviction"),
            *grid("short", 13, 0, [0], [1.0, 0.98], {(0, 1.0): '+ 1: frozen; "The The The …"'}),
            Row("short", 13, queries="key", note="scored by keys, as the seed does"),
            Defaults("short", 13),
            Row("short", 13, 2, 8, 0.98, note="a grace that fits"),
            *grid("short", 15, 0, [0], [1.0, 0.98], {(0, 1.0): "+ 3: phrase loop"}),
            Defaults("short", 15),
            Row("short", 15, 2, 8, 0.98, note="a grace that fits"),
            *grid("short", 22, 0, [0, 16], [1.0, 0.98], {(0, 1.0): "+ 10: longer phrase loop"}),
            Defaults("short", 22),
            Row("64 tokens of prose", NO_EVICTION, note="no eviction"),
            *grid("64 tokens of prose", 32, 0, [0, 16], [1.0, 0.98], {(0, 1.0): '"- - - - - …": total collapse'}),
            Row("64 tokens of prose", 32, queries="key", note="scored by keys, as the seed does"),
            Defaults("64 tokens of prose", 32),
            Row("72 tokens of prose", NO_EVICTION, note="no eviction"),
            *grid("72 tokens of prose", 64, 0, [0, 16], [1.0, 0.98], {(0, 1.0): "blank lines only (Mistral-7B)"}),
            Row("72 tokens of prose", 64, queries="key", note="scored by keys, as the seed does"),
            Defaults("72 tokens of prose", 64),
        ],
    ),
    Section(
        "2. Little more than n_sink + grace",
        "The seed: budget 14, n_sink 2, grace 8, four places for the rest. Kept with grace 8: [0..5, 27, 29, … 41]; "
        "every second position, with or without decay.",
        42,
        [
            Row("short", 14, 2, seed="[0..13] for ever"),
            Row("short", 14, 2, 8, seed="every second position: … 47, 49, 51, 53"),
            Row("short", 14, 2, 8, 0.98, seed="the same"),
            Row("short", 14, 2, 8, queries="key", note="scored by keys, as the seed does"),
            Defaults("short", 14),
        ],
    ),
    Section(
        "3. Four hundred steps through a budget of 64",
        "The seed: n_sink 4, grace 16. Without decay the kept set stays at the prompt, with it the set moves on.",
        400,
        [
            Row("photosynthesis", NO_EVICTION, note="no eviction"),
            Row("photosynthesis", 64, 4, seed="frozen"),
            Row("photosynthesis", 64, 4, 16, seed="[4..21, 24, 26, … 74] and the newest"),
            Row("photosynthesis", 64, 4, 16, 0.98, seed="[297, 299, … 415]"),
            Defaults("photosynthesis", 64),
        ],
    ),
    Section(
        "4. The open fault: text that breaks at the first eviction",
        'The seed: budget 128, n_sink 2, grace 32. "... occurs in the th th th th", the same text and kept positions '
        "with decay 1 and 0.98; without eviction the text holds for 300 tokens.",
        300,
        [
            Row("photosynthesis", NO_EVICTION, seed="coherent for 300 tokens", note="no eviction"),
            Row("photosynthesis", 128, 2, 32, seed='"th th th th" from the first eviction'),
            Row("photosynthesis", 128, 2, 32, 0.98, seed="the same, token for token"),
            Defaults("photosynthesis", 128),
        ],
    ),
    Section(
        "5. A long prompt",
        "The seed: 3,238 tokens of prompt, grace 0, decay 1, 300 to 400 tokens generated. In every case the kept set "
        "was exactly [0..budget-1]. Its first version could not read the prompt without eviction at all (Metal's "
        "resource limit); the next one took 2.4 to 3.2 s.",
        150,
        [
            Row("3,238 tokens of prose", NO_EVICTION, seed="read in 2.4 to 3.2 s once mended", note="no eviction"),
            Row("3,238 tokens of prose", 256, seed='frozen; "of of of of of"'),
            Row("3,238 tokens of prose", 256, decay=0.98),
            Row("3,238 tokens of prose", 256, 4, 16),
            Defaults("3,238 tokens of prose", 256),
            Row("3,238 tokens of prose", 256, queries="key", note="scored by keys, as the seed does"),
            Row("3,238 tokens of prose", 800, seed="frozen; gibberish"),
            Defaults("3,238 tokens of prose", 800),
            Row("3,238 tokens of prose", 1200, seed='frozen; "I am I am I am"'),
            Defaults("3,238 tokens of prose", 1200),
        ],
    ),
]


class Outcome(NamedTuple):
    """What came of a cell: generated tokens, positions kept by every head, and the prompt's cost."""

    tokens: list
    kept: list  # [layers x KV heads] of ascending positions
    seconds: float  # the prompt's


class Runner:
    """Runs each configuration on each prompt once."""

    def __init__(self):
        self.model, self.tokenizer = h2o_mlxlm.load()
        self.done = {}

    def prompt(self, name):
        """Tokens of a prompt by its name."""
        from h2o_mlxlm.evaluation.passes import templated

        if name == "short":
            return self.tokenizer.encode(SHORT)
        if name == "photosynthesis":
            return templated(self.tokenizer, PHOTOSYNTHESIS)
        n = int(name.split()[0].replace(",", ""))
        return self.tokenizer.encode(PROSE.read_text(encoding="utf-8")[: 10 * n])[:n]

    def __call__(self, row, n_tokens):
        """Run a cell, or take its outcome from before."""
        key = row.prompt, row.config(), n_tokens
        if key not in self.done:
            began = time.perf_counter()
            self.done[key] = self.run(self.prompt(row.prompt), row.config(), n_tokens)
            print(f"{time.perf_counter() - began:6.1f} s  {row}", file=sys.stderr, flush=True)
        return self.done[key]

    def run(self, prompt, config, n_tokens):
        """Read the prompt as mlx_lm does, then generate the likeliest tokens."""
        import mlx.core as mx

        from h2o_mlxlm.evaluation.passes import chooser, continued

        caches = h2o_mlxlm.make_prompt_cache(self.model, config)
        choose = chooser(0, 0, sorted(self.tokenizer.eos_token_ids))
        began, seconds, tokens = time.perf_counter(), 0.0, []
        for token in continued(self.model, caches, mx.array([prompt]), n_tokens, choose):
            tokens.append(token.item())
            seconds = seconds or time.perf_counter() - began
        return Outcome(tokens, [head for c in caches for head in c.kept_positions[0].tolist()], seconds)


def ranges(positions):
    """Write ascending positions as ranges: 0-3, 7, 9-12; cut in the middle if there are many."""
    runs = []
    for position in positions:
        if runs and position == runs[-1][1] + 1:
            runs[-1][1] = position
        else:
            runs.append([position, position])
    parts = [f"{a}-{b}" if b > a else f"{a}" for a, b in runs]
    return ", ".join(parts if len(parts) <= 9 else [*parts[:5], "…", *parts[-3:]])


def as_full(tokens, full):
    """Tokens before the first that differs from the full cache's."""
    return next((i for i, (a, b) in enumerate(zip(tokens, full, strict=True)) if a != b), len(full))


def stretch(tokens):
    """Longest stretch of text that is at most 4 tokens over and over: "th th th", "A C A C"."""
    longest = 0
    for period in range(1, 5):
        run = 0
        for one, other in zip(tokens, tokens[period:], strict=False):
            run = run + 1 if one == other else 0
            longest = max(longest, run + period if run else 0)
    return longest


def verdict(tokens):
    """Say how text goes on."""
    from h2o_mlxlm.evaluation.variety import loops

    n = stretch(tokens)
    return f"stuck ({n})" if n >= STUCK else "repeats itself" if loops(tokens) else "holds"


def line(runner, row, n_tokens):
    """Cells of a row of the table, and its text from the first eviction on."""
    out, config, n_prompt = runner(row, n_tokens), row.config(), len(runner.prompt(row.prompt))
    full = runner(Row(row.prompt, NO_EVICTION), n_tokens).tokens
    evicts = config.budget < n_prompt + n_tokens - 1
    start = max(0, config.budget - n_prompt) if evicts else 0
    frozen = sum(held == list(range(config.budget)) for held in out.kept)
    new = sum(position >= n_prompt for held in out.kept for position in held) / len(out.kept)
    same = as_full(out.tokens, full)
    cells = [
        f"{row.prompt} ({n_prompt})" if row.prompt in ("short", "photosynthesis") else row.prompt,
        f"{config.budget:,}",
        f"{config.n_sink}, {config.grace}, {config.decay:g}"
        + (f", long_share {config.long_share:g}" if config.long_share else ""),
        row.note or ("the seed's" if row.seed else ""),
        row.seed or "-",
        ranges(out.kept[len(out.kept) // 2]) if evicts else "all",
        f"{frozen} of {len(out.kept)}" if evicts else "-",
        f"{new:.0f}" if evicts else "-",
        "all" if same == n_tokens else f"{same}",
        verdict(out.tokens[start:]),
        f"{out.seconds:.1f}",
    ]
    return cells, runner.tokenizer.decode(out.tokens[start:])


def shortened(text):
    """Cut the middle out of a long text."""
    return text if len(text) <= 170 else f"{text[:110]} [...] {text[-50:]}"


def differ_by_decay(one, other):
    """Say whether two rows are alike but for decay 1 and 0.98."""
    both = isinstance(one, Row) and isinstance(other, Row) and (one.decay, other.decay) == (1, 0.98)
    return both and one._replace(decay=0.98, seed="") == other._replace(seed="")


HEADER = (
    *("", "prompt", "budget", "n_sink, grace, decay", "settings", "the seed saw", "ours keeps"),
    *("heads frozen", "generated tokens kept", "as without eviction for", "text", "prompt, s"),
)


def show(runner, section, n_tokens):
    """Print a table and its texts."""
    print(f"\n## {section.title}\n\n{section.about} {n_tokens} tokens generated here.\n", flush=True)
    print("| " + " | ".join(HEADER) + " |\n|" + "---|" * len(HEADER), flush=True)
    texts = []
    for i, row in enumerate(section.rows, 1):
        cells, text = line(runner, row, n_tokens)
        texts.append(f"{i:>2}  {shortened(' '.join(text.split()))}")
        print("| " + " | ".join([str(i), *cells]) + " |", flush=True)
    print("\nThe texts from the first eviction on:\n\n```text\n" + "\n".join(texts) + "\n```", flush=True)
    pairs = [p for p in enumerate(pairwise(section.rows), 1) if differ_by_decay(*p[1])]
    if pairs:
        print("\nDecay 1 against 0.98:\n")
    for i, pair in pairs:
        one, other = (runner(row, n_tokens) for row in pair)
        equal = sum(a == b for a, b in zip(one.kept, other.kept, strict=True))
        same = as_full(one.tokens, other.tokens)
        print(
            f"- rows {i} and {i + 1}: the same text for {same} tokens, "
            f"the same kept set in {equal} of {len(one.kept)} heads"
        )


def main():
    """Print the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=int, nargs="+", help="numbers of tables")
    parser.add_argument("--tokens", type=int, help="generate no more than this")
    args = parser.parse_args()
    runner = Runner()
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("mlx", "mlx-lm", "h2o-mlxlm"))
    print("# The seed's tables, done again\n")
    print(f"    uv run tools/{Path(sys.argv[0]).name} {' '.join(sys.argv[1:])}".rstrip() + "\n")
    print(f"SmolLM2-135M-Instruct in float32, {platform.platform()}, CPU, {versions}, {date.today()}.\n")
    print(ABOUT)
    for number, section in enumerate(SECTIONS, 1):
        if args.only is None or number in args.only:
            show(runner, section, min(section.tokens, args.tokens or section.tokens))


ABOUT = """\
*Ours keeps*: positions held at the end by KV head 0 of the middle layer, the prompt's from 0. *Heads frozen*: heads,
of 90 (30 layers, 3 KV heads), that hold exactly the first `budget` tokens. *Generated tokens kept*: mean over heads.
*As without eviction for*: tokens before the text first differs from the one without eviction. *Text*: from the first
eviction on it is "stuck" (at most 4 tokens over and over, for so many tokens, at least 16), "repeats itself" (in some
window of 100 tokens, or in the whole text if it is shorter, fewer than half of the 4-grams are new; a model this small
does so by itself) or "holds". *Prompt, s*: seconds to the first token, on a machine busy with other work.
Rows without a name are settings that the seed did not try."""


if __name__ == "__main__":
    main()
