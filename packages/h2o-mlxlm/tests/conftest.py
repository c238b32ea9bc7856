"""A tiny Llama with random weights and a byte-level tokenizer, as a folder that mlx_lm loads."""

import json

import mlx.core as mx
import mlx_lm
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

ARGS = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
SPECIAL = ["<|bos|>", "<|end|>", "<|eot|>"]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and m.content == 'refuse' %}{{ raise_exception('no system') }}"
    "{% endif %}[{{ m.role }}]{{ m.content }}{% if not loop.last %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|end|>[assistant]{% endif %}"
)


@pytest.fixture(scope="session")
def vocabulary():
    """The three special tokens, all bytes, and a few merges: tokens and merges."""
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("1", "2"), ("12", "3"), ("123", "4"), ("Ġ", "w")]
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    return tokens, merges


@pytest.fixture(scope="session")
def make_model(vocabulary):
    """Make a model with weights large enough for its logits to differ."""

    def make(**changes):
        mx.random.seed(0)
        model = Model(ModelArgs(**(ARGS | {"vocab_size": len(vocabulary[0])} | changes)))
        weights = [(name, mx.random.normal(w.shape) * (0.02 if w.ndim == 1 else 0.2)) for name, w in flat(model)]
        model.load_weights([(name, w + 1 if w.ndim == 1 else w) for name, w in weights])
        mx.eval(model.parameters())
        return model

    return make


@pytest.fixture(scope="session")
def make_folder(tmp_path_factory, make_model, vocabulary):
    """Write a model with untied float32 weights, its tokenizer and a chat template."""

    def make(**changes):
        folder, (tokens, merges) = tmp_path_factory.mktemp("tiny"), vocabulary
        model = make_model(tie_word_embeddings=False, **changes)
        mx.save_safetensors(str(folder / "model.safetensors"), dict(flat(model)), {"format": "mlx"})
        config = ARGS | {"vocab_size": len(tokens), "tie_word_embeddings": False, "eos_token_id": 1} | changes
        (folder / "config.json").write_text(json.dumps(config))
        tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(SPECIAL)
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{SPECIAL[0]} $A", special_tokens=[(SPECIAL[0], 0)]
        )
        tokenizer.save(str(folder / "tokenizer.json"))
        names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": SPECIAL[0], "eos_token": SPECIAL[1]}
        (folder / "tokenizer_config.json").write_text(json.dumps(names | {"chat_template": TEMPLATE}))
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_folder(make_folder):
    return make_folder()


def flat(model):
    return tree_flatten(model.parameters())


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that reach mlx_lm, decoded."""
    seen, real = [], mlx_lm.stream_generate

    def spy(model, tokenizer, prompt, **settings):
        seen.append(tokenizer.decode(prompt))
        return real(model, tokenizer, prompt, **settings)

    monkeypatch.setattr(mlx_lm, "stream_generate", spy)
    return seen
