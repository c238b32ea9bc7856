"""The pictures of the documents, each from a CSV file that a command of ours wrote.

    uv run --with matplotlib tools/plots.py loss docs/results/loss.csv docs/loss
    uv run --with matplotlib tools/plots.py kept docs/results/kept.csv docs/kept
    uv run --with matplotlib tools/plots.py long docs/results/long.csv docs/long
    uv run --with matplotlib tools/plots.py retrieval docs/results/retrieval.csv docs/retrieval
    uv run --with matplotlib tools/plots.py needs docs/results/needs.csv docs/needs

Each writes a .png and an .svg. ``loss`` and ``retrieval`` take the rows.csv of ``h2o-mlxlm eval``, ``needs`` that of
``h2o-mlxlm calibrate``, ``long`` that of ``h2o-mlxlm bench long --out``, ``kept`` that of tools/kept.py. ``--name OLD
NEW`` writes a method otherwise than the file does, and may be repeated; ``--only NAME ...`` leaves out the others.
"""

import argparse
import csv
import math
from collections import defaultdict
from pathlib import Path

import matplotlib as mpl

mpl.use("agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.collections import PolyCollection
from matplotlib.colors import PowerNorm
from matplotlib.patches import Rectangle
from matplotlib.ticker import NullLocator

# Okabe and Ito's colours, which stay apart for colour-blind eyes; markers tell the same once more.
BLUE, ORANGE, GREY, RED, GREEN = "#0072B2", "#E69F00", "#595959", "#D55E00", "#009E73"
STYLES = {"h2o": (BLUE, "o"), "recency": (GREY, "s"), "full": ("#000000", "D"), "random": (ORANGE, "^")}
STYLES |= {"calibrated": (RED, "v"), "calibrated-layers": (GREEN, "P")}
OTHERS = [("#CC79A7", "X"), ("#56B4E9", "d"), ("#A07800", "<"), ("#6A3D9A", ">"), ("#44AA99", "h")]
NAMES = {
    "h2o evict_during_prefill=True": "h2o",
    "h2o evict_during_prefill=False": "h2o, held",
    "calibrated evict_during_prefill=True": "calibrated\nheads",
    "calibrated evict_during_prefill=False": "calibrated\nheads, held",
    "calibrated-layers evict_during_prefill=True": "calibrated\nlayers",
    "calibrated-layers evict_during_prefill=False": "calibrated\nlayers, held",
}
N_RESAMPLES = 2000
WIDTH = 8.4  # inches

mpl.rcParams.update(
    {
        "font.size": 8.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 8.5,
        "axes.titlelocation": "left",
        "figure.constrained_layout.use": True,
        "svg.hashsalt": "h2o",
    }
)


# Reading


def read(path):
    """Rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def named(rows, renamed, only):
    """Give each row of ``eval`` a ``name``, and refuse a file that mixes what can't be compared."""
    seen = defaultdict(set)
    for row in rows:
        name = " ".join(part for part in (row["method"], row["settings"], row["label"]) if part)
        row["name"] = renamed.get(name, name)
        seen[row["name"], row["budget"]].add(row["config"])
        if "text" in row:
            seen["text", row["text"]].add(row["run"])
    for (name, which), values in seen.items():
        if len(values) > 1:
            raise SystemExit(
                f"{name!r} {which} was measured in {len(values)} ways ({', '.join(sorted(values))} in the columns run "
                "or config): leave one of them in the file"
            )
    return [row for row in rows if not only or row["name"] in only]


def styles(names):
    """A colour and a marker for each name, the same in every picture for the methods everybody knows."""
    others = iter(OTHERS * math.ceil(len(names) / len(OTHERS)))
    return {name: STYLES[name] if name in STYLES else next(others) for name in names}


def save(figure, path):
    """Write both files; without a date, so that the same data gives the same files."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(f"{path}.png", dpi=180)
    figure.savefig(f"{path}.svg", metadata={"Date": None})
    print(f"{path}.png {path}.svg")


def label_ends(axes, ends, colours, gap=11):
    """Write names at the right of the axes at the height of their lines' ends, moved apart where they would touch.

    Args:
        axes: Of linear scale and final limits.
        ends: name to y.
        colours: name to colour.
        gap: Points that a line of text takes at least.
    """
    low, high = axes.get_ylim()
    height = axes.get_window_extent().height * 72 / axes.figure.dpi
    names = sorted(ends, key=ends.get)
    texts = [name.replace(" ", "\n", 1) if len(name) > 22 else name for name in names]
    lines = [text.count("\n") + 1 for text in texts]
    places = [(ends[name] - low) / (high - low) * height for name in names]
    for _ in range(200):
        for i in range(len(places) - 1):
            apart = gap * (lines[i] + lines[i + 1]) / 2
            short = max(0.0, apart - (places[i + 1] - places[i])) / 2
            places[i], places[i + 1] = places[i] - short, places[i + 1] + short
    for name, text, place in zip(names, texts, places, strict=True):
        at = (1.0, place / height)
        axes.annotate(
            text,
            at,
            xycoords="axes fraction",
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            color=colours[name],
            fontweight="bold" if name in STYLES else "normal",
        )


# Loss


def spread(by_text, draws):
    """Mean over texts of each text's mean, and half-lengths of its 95 % interval: windows drawn again in each text."""
    texts = sorted(by_text)
    mean = np.mean([np.mean(by_text[t]) for t in texts])
    if any(len(by_text[t]) < 2 for t in texts):
        return mean, 0.0, 0.0
    sampled = np.mean([by_text[t][draws[t] % len(by_text[t])].mean(axis=1) for t in texts], axis=0)
    low, high = np.quantile(sampled, (0.025, 0.975))
    return mean, mean - low, high - mean


def losses(rows):
    """Losses above full: name to budget to text to one value a window, the mean over seeds."""
    found = defaultdict(lambda: defaultdict(lambda: defaultdict(lambda: defaultdict(list))))
    for row in rows:
        if row["method"] != "full":
            window = found[row["name"]][int(row["budget"])][row["text"]]
            window[int(row["window"])].append(float(row["above_full"]))
    return {
        name: {
            budget: {text: np.array([np.mean(w[i]) for i in sorted(w)]) for text, w in texts.items()}
            for budget, texts in sorted(budgets.items())
        }
        for name, budgets in found.items()
    }


def draw_losses(axes, values, texts, style, draws):
    """Draw one line for each method, of the mean over ``texts``, and return where they end."""
    ends = {}
    for i, (name, budgets) in enumerate(values.items()):
        colour, marker = style[name]
        whole = {b: {t: v[t] for t in texts} for b, v in budgets.items() if all(t in v for t in texts)}
        if not whole:
            continue
        aside = 2 ** (0.05 * (i - (len(values) - 1) / 2))  # bars side by side
        means, below, above = np.array([spread(v, draws) for v in whole.values()]).T
        x = np.array(list(whole)) * aside
        axes.errorbar(
            x,
            means,
            (below, above),
            color=colour,
            marker=marker,
            markersize=3.5,
            linewidth=1.4,
            elinewidth=0.9,
            label=name,
        )
        ends[name] = means[-1]
    budgets = sorted({b for v in values.values() for b in v})
    axes.set_xscale("log", base=2)
    axes.set_xticks(budgets, [f"{b:,}" for b in budgets])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(budgets[0] * 0.85, budgets[-1] * 1.18)
    axes.set_ylim(bottom=min(0.0, axes.get_ylim()[0]))
    axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
    axes.set_axisbelow(True)
    return ends


def loss(args):
    """Loss above full against the budget: the mean over texts, and each text."""
    values = losses(named(read(args.csv), args.renamed, args.only))
    texts = sorted({t for budgets in values.values() for v in budgets.values() for t in v})
    style = styles(values)
    rng = np.random.default_rng(0)
    most = max(len(v) for budgets in values.values() for b in budgets.values() for v in b.values())
    draws = {t: rng.integers(0, most, (N_RESAMPLES, most)) for t in texts}
    columns = len(texts) if len(texts) <= 3 else math.ceil(len(texts) / 2)
    figure = plt.figure(figsize=(WIDTH, 5.6))
    top, bottom = figure.subfigures(2, 1, height_ratios=[1.15, 1.5 if len(texts) > columns else 0.9])
    axes = top.subplots()
    ends = draw_losses(axes, values, texts, style, draws)
    axes.set(title=f"Mean of {len(texts)} texts", xlabel="budget, tokens per KV head", ylabel="loss above full, nats")
    small = bottom.subplots(math.ceil(len(texts) / columns), columns, squeeze=False)
    for text, one in zip(texts, small.flat, strict=False):
        draw_losses(one, values, [text], style, draws)
        one.set_title(text)
        one.tick_params(labelsize=7.5)
    for one in small.flat[len(texts) :]:
        one.axis("off")
    bottom.supxlabel("budget, tokens per KV head; each text has its own scale", fontsize=8.5)
    bottom.supylabel("loss above full, nats", fontsize=8.5)
    figure.canvas.draw()
    label_ends(axes, ends, {name: colour for name, (colour, _) in style.items()})
    save(figure, args.out)


# Kept positions


def kept(args):
    """Draw the positions that a head holds over the steps, a panel for each setting."""
    rows = read(args.csv)
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    figure, panels = plt.subplots(1, len(settings), figsize=(WIDTH, 3.1), sharey=True, sharex=True, squeeze=False)
    for setting, axes in zip(settings, panels.flat, strict=True):
        own = [row for row in rows if row["setting"] == setting]
        prompt, steps = int(own[0]["prompt"]), int(own[0]["steps"])
        for is_new, colour in ((False, BLUE), (True, ORANGE)):
            boxes = [
                [(x0, y - 0.5), (x1 + 1, y - 0.5), (x1 + 1, y + 0.5), (x0, y + 0.5)]
                for x0, x1, y in ((int(r["first"]), int(r["last"]), int(r["position"])) for r in own)
                if (y >= prompt) == is_new
            ]
            axes.add_collection(PolyCollection(boxes, facecolors=colour, linewidths=0))
        axes.axhline(prompt - 0.5, color=GREY, linewidth=0.6, linestyle=(0, (4, 3)))
        axes.set(xlim=(0, steps + 1), ylim=(-4, prompt + steps), title=setting)
    first = panels.flat[0]
    first.set_ylabel("position in the text, tokens")
    for text, colour, place in (("after the prompt", "#9A6A00", 0.97), ("of the prompt", BLUE, 0.90)):
        first.text(0.05, place, text, color=colour, va="top", transform=first.transAxes)
    figure.supxlabel(f"tokens read after the prompt (budget {rows[0]['budget']})", fontsize=8.5)
    save(figure, args.out)


# Long runs


def long(args):
    """Memory in use and time per token over the tokens generated."""
    rows = [row for row in read(args.csv) if row["kind"] == "window"]
    least = min(rows, key=lambda row: int(row["budget"]))["budget"]  # full runs again with each budget
    rows = [row for row in rows if row["variant"] != "full" or row["budget"] == least]
    several = {row["variant"] for row in rows if row["variant"] != "full"}
    counts = {v: len({row["budget"] for row in rows if row["variant"] == v}) for v in several}
    lines = defaultdict(list)
    for row in rows:
        name = row["variant"] + (f" {row['budget']}" if counts.get(row["variant"], 1) > 1 else "")
        name = args.renamed.get(name, name)
        if not args.only or name in args.only:
            lines[name].append((int(row["last"]), float(row["active_mib"]), float(row["ms_per_token"])))
    style = styles(lines)
    figure, panels = plt.subplots(1, 2, figsize=(WIDTH, 2.9))
    both = []
    for i, axes in enumerate(panels, 1):
        ends = {}
        for name, points in lines.items():
            points = np.array(sorted(points))
            axes.plot(points[:, 0], points[:, i], color=style[name][0], linewidth=1.5)
            ends[name] = points[-1, i]
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(axis="y", color="#E6E6E6", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        both.append((axes, ends))
    panels[0].set(xlabel="tokens generated", ylabel="memory in use, MiB, model included")
    panels[1].set(xlabel="tokens generated", ylabel="time per token, ms")
    figure.canvas.draw()
    for axes, ends in both:
        label_ends(axes, ends, {name: colour for name, (colour, _) in style.items()})
    save(figure, args.out)


# Retrieval


def counted(rows):
    """Count keys: (name, budget, form) to (depth, length) to (found, of those that the full cache finds)."""
    full = {row["run"]: int(row["found"]) for row in rows if row["method"] == "full"}
    cells = defaultdict(lambda: defaultdict(lambda: [0, 0]))
    for row in rows:
        if row["method"] == "full" or full.get(row["run"]):
            cell = cells[row["name"], int(row["budget"]), row["form"]][float(row["depth"]), int(row["length"])]
            cell[0] += int(row["found"])
            cell[1] += 1
    return cells


def draw_map(axes, cells, depths, lengths):
    """Draw depth by length, a square each: darker the more keys are found; hatched where there is nothing to find."""
    shades = mpl.colormaps["Blues"]
    for i, depth in enumerate(depths):
        for j, length in enumerate(lengths):
            found, trials = cells.get((depth, length), (0, 0))
            if not trials:
                box = Rectangle((j, i), 1, 1, facecolor="white", edgecolor="#B0B0B0", hatch="////", linewidth=0)
            else:
                box = Rectangle((j, i), 1, 1, facecolor=shades(0.9 * found / trials), edgecolor="white", linewidth=1)
                colour = "white" if found / trials > 0.6 else "black"
                axes.text(j + 0.5, i + 0.5, f"{found}/{trials}", ha="center", va="center", color=colour, fontsize=8)
            axes.add_patch(box)
    axes.set(xlim=(0, len(lengths)), ylim=(len(depths), 0))
    axes.set_xticks(np.arange(len(lengths)) + 0.5, [f"{n:,}" for n in lengths])
    axes.set_yticks(np.arange(len(depths)) + 0.5, [f"{d:g}" for d in depths])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def retrieval(args):
    """Maps of the keys found: a column for each method, a row for each text and budget."""
    cells = counted(named(read(args.csv), args.renamed, args.only and {*args.only, "full"}))
    depths = sorted({d for found in cells.values() for d, _ in found})
    lengths = sorted({n for found in cells.values() for _, n in found})
    forms = list(dict.fromkeys(form for *_, form in cells))
    budgets = sorted({b for _, b, _ in cells if b})
    names = ["full", *dict.fromkeys(name for name, *_ in cells if name != "full")]
    lines = [(form, budget) for form in forms for budget in budgets]
    height = 0.55 + (0.28 * len(depths) + 0.35) * len(lines)
    figure, panels = plt.subplots(len(lines), len(names), figsize=(WIDTH, height), squeeze=False)
    for i, ((form, budget), row) in enumerate(zip(lines, panels, strict=True)):
        shown = names if budget == budgets[0] else names[1:]  # the full cache has no budget: once is enough
        for axes in row[: len(names) - len(shown)]:
            axes.axis("off")
        for name, axes in zip(shown, row[-len(shown) :], strict=True):
            draw_map(axes, cells.get((name, 0 if name == "full" else budget, form), {}), depths, lengths)
            last = i + 1 == len(lines) or (name == "full" and len(budgets) > 1)
            axes.tick_params(labelleft=name == shown[0], labelbottom=last)
            axes.set_title(name if i == 0 else "")
        row[-1].yaxis.set_label_position("right")
        row[-1].set_ylabel(f"{form}\nbudget {budget}", rotation=0, ha="left", va="center")
    figure.supylabel("depth of the key (0 first, 1 last)", fontsize=8.5)
    note = "keys found of those that the full cache finds; hatched: it finds none there, or not measured"
    figure.supxlabel(f"tokens of the prompt\n{note}", fontsize=8.5)
    save(figure, args.out)


# Needs of heads


def shares_by_text(rows, budget):
    """What each head costs with a budget, as a share of all heads: text to an array [layers, heads]."""
    found = defaultdict(lambda: defaultdict(list))
    for row in rows:
        if int(row["budget"]) == budget:
            found[row["text"]][int(row["layer"]), int(row["head"])].append(max(0.0, float(row["kl"])))
    shares = {}
    for text, heads in sorted(found.items()):
        shape = [max(place) + 1 for place in zip(*heads, strict=True)]
        costs = np.zeros(shape)
        for place, values in heads.items():
            costs[place] = np.mean(values)
        shares[text] = costs / costs.sum()
    return shares


def needs(args):
    """Map what bounding one head alone costs, a panel for each text and one for their mean."""
    rows = read(args.csv)
    budget = min(int(row["budget"]) for row in rows)
    shares = shares_by_text(rows, budget)
    panels = {"mean": np.mean(list(shares.values()), axis=0)} | shares
    figure, row_of_axes = plt.subplots(1, len(panels), figsize=(WIDTH, 4.2), sharey=True)
    most = max(x.max() for x in panels.values())
    for (name, costs), axes in zip(panels.items(), row_of_axes, strict=True):
        image = axes.imshow(100 * costs, aspect="auto", cmap="Blues", norm=PowerNorm(0.5, 0, 100 * most))
        axes.set_title(name)
        axes.set_xticks(range(costs.shape[1]))
        axes.tick_params(length=0)
    row_of_axes[0].set_ylabel("layer")
    figure.supxlabel(f"KV head, alone bounded to {budget} tokens", fontsize=8.5)
    figure.colorbar(image, ax=row_of_axes, label="share of all heads' divergence, %", aspect=30)
    save(figure, args.out)


def main():
    """Draw the picture asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(required=True, metavar="KIND")
    for kind in (loss, kept, long, retrieval, needs):
        added = kinds.add_parser(kind.__name__, help=kind.__doc__)
        added.add_argument("csv", type=Path)
        added.add_argument("out", type=Path, help="path without ending")
        added.add_argument("--name", nargs=2, action="append", default=[], metavar=("OLD", "NEW"))
        added.add_argument("--only", nargs="+", default=[], metavar="NAME")
        added.set_defaults(run=kind)
    args = parser.parse_args()
    args.renamed = NAMES | dict(args.name)
    args.run(args)


if __name__ == "__main__":
    main()
