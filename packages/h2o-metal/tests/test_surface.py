"""Each function here stands in for one of h2o_core, so its signature must be that one's."""

import inspect

import pytest

import h2o_core
import h2o_metal


@pytest.mark.parametrize("name", h2o_metal.__all__)
def test_signatures_are_the_references(name):
    ours, reference = getattr(h2o_metal, name), getattr(h2o_core, name)
    assert inspect.signature(ours) == inspect.signature(reference)
