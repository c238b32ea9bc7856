"""Which positions one KV head keeps, step by step, under four settings of the same budget.

    uv run tools/kept.py docs/results/kept.csv
    uv run --with matplotlib tools/plots.py kept docs/results/kept.csv docs/kept

The model reads a text: the prompt as mlx_lm sends it (all but its last token in one call), then one token a
call. A position that has gone never comes back, so the CSV has one row for each position that was ever held
after the prompt: the step it was first held at and the one it was last held at. Step 0 is the end of the prompt.
"""

import argparse
import csv
from pathlib import Path

import h2o_mlxlm
from h2o_mlxlm import H2OConfig

TEXT = Path(__file__).parent / "tuning_texts" / "prose.txt"
COLUMNS = ("setting", "layer", "head", "budget", "prompt", "steps", "position", "first", "last")


def settings(budget, queries):
    """The four settings, by name; the last is whatever the defaults are today."""
    common = {"budget": budget, "n_sink": 4, "long_share": 0.0, "queries": queries}
    return {
        "grace 0": H2OConfig(**common, grace=0, decay=1.0),
        "grace": H2OConfig(**common, grace=16, decay=1.0),
        "grace + decay": H2OConfig(**common, grace=16, decay=0.98),
        "default": H2OConfig(budget=budget, queries=queries),
    }


def kept(model, tokens, config, prompt, layer, head):
    """Positions that the head holds after the prompt and after each further token: lists of ints.

    Layers above the one that is looked at must be gone from the model: they change nothing below.
    """
    import mlx.core as mx

    caches = h2o_mlxlm.make_prompt_cache(model, config)
    held = []
    ids = mx.array([tokens])
    for start, end in [(0, prompt - 1), *((i, i + 1) for i in range(prompt - 1, len(tokens)))]:
        hidden = model.model(ids[:, start:end], cache=caches)
        mx.eval(hidden, [c.state for c in caches])
        if end >= prompt:
            held.append(caches[layer].kept_positions[0, head].tolist())
    return held


def spans(held):
    """First and last step at which each position was held."""
    found = {}
    for step, positions in enumerate(held):
        for position in positions:
            first, _ = found.get(position, (step, step))
            found[position] = (first, step)
    return found


def report(name, held, budget, prompt):
    """Say how much of the prompt's beginning is still there, and how old the kept set is."""
    last, now = held[-1], prompt + len(held) - 2
    early = sum(position < budget for position in last) / budget
    age = sum(now - position for position in last) / len(last)
    new = sum(position >= prompt for position in last)
    return (
        f"{name:<14} of the first {budget} tokens still held {early:4.0%}   mean age {age:4.0f} tokens   "
        f"from after the prompt {new:3} of {len(last)}"
    )


def main():
    """Run the settings one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="CSV file")
    parser.add_argument("--text", type=Path, default=TEXT)
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt (%(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="tokens after it, one a call (%(default)s)")
    parser.add_argument("--layer", type=int, help="the middle one if not given")
    parser.add_argument("--head", type=int, default=0, help="KV head (%(default)s)")
    parser.add_argument("--queries", choices=["true", "key"], default="true")
    parser.add_argument("--model", help="hub id, folder or .gguf file; the installed small model if not given")
    args = parser.parse_args()
    model, tokenizer = h2o_mlxlm.load(args.model)
    layer = len(model.layers) // 2 if args.layer is None else args.layer
    del model.layers[layer + 1 :]
    length = args.prompt + args.steps
    tokens = tokenizer.encode(args.text.read_text(encoding="utf-8")[: 10 * length])[:length]
    print(f"{args.text.name}, budget {args.budget}, layer {layer}, KV head {args.head}, queries {args.queries}")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    with args.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, config in settings(args.budget, args.queries).items():
            held = kept(model, tokens, config, args.prompt, layer, args.head)
            common = (name, layer, args.head, args.budget, args.prompt, len(held) - 1)
            writer.writerows((*common, position, *span) for position, span in sorted(spans(held).items()))
            print(report(name, held, args.budget, args.prompt), flush=True)


if __name__ == "__main__":
    main()
