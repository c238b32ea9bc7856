import math

import pytest

from h2o_core import H2OConfig


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget must be between 1 and .* got 0"),
        ({"budget": 2.5}, TypeError, "budget must be an integer number of tokens, got 2.5"),
        ({"budget": True}, TypeError, "budget must be an integer"),
        ({"n_sink": -1}, ValueError, "n_sink must be between 0 and .* got -1"),
        ({"grace": -1}, ValueError, "grace must be between 0 and .* got -1"),
        ({"budget": 20, "grace": 16}, ValueError, "n_sink=4, grace=16, budget=20: raise budget above 20"),
        ({"decay": 0}, ValueError, r"decay must be in \(0, 1\], got 0"),
        ({"decay": 1.01}, ValueError, r"decay must be in \(0, 1\], got 1.01"),
        ({"decay": math.nan}, ValueError, r"decay must be in \(0, 1\], got nan"),
        ({"decay": "1"}, TypeError, "decay must be a number"),
        ({"long_share": 1.5}, ValueError, r"long_share must be in \[0, 1\], got 1.5"),
        ({"long_share": math.nan}, ValueError, r"long_share must be in \[0, 1\], got nan"),
        ({"long_share": True}, TypeError, "long_share must be a number"),
        ({"queries": "both"}, ValueError, "queries must be one of 'true', 'key', got 'both'"),
        ({"positions": "mixed"}, ValueError, "positions must be one of 'original', 'rolling', 'auto', got 'mixed'"),
        ({"trained_length": 4096}, ValueError, 'trained_length is for positions="auto" alone, got 4096'),
        ({"trained_length": 0, "positions": "auto"}, ValueError, "trained_length must be between 1 and"),
        ({"trained_length": 512, "positions": "auto"}, ValueError, "budget=512, trained_length=512"),
        ({"trained_length": 515, "positions": "auto", "rewind": 3}, ValueError, r"budget \+ rewind must be below"),
        ({"rewind": -1}, ValueError, "rewind must be between 0 and 64 tokens, got -1"),
        ({"rewind": 65}, ValueError, "rewind must be between 0 and 64 tokens, got 65"),
        ({"rewind": True}, TypeError, "rewind must be an integer number of tokens, got True"),
        ({"rewind": 2, "queries": "key"}, ValueError, 'rewind needs queries="true", got rewind=2.*use rewind=0'),
        ({"rewind": 2, "scorer": "cam"}, ValueError, "'cam' merges values, which can't be taken apart.*use rewind=0"),
        ({"rewind": 2, "scorer": "snapkv"}, ValueError, "'snapkv' takes a call of one token for the end of.*rewind=2"),
        ({"evict_during_prefill": 1}, TypeError, "evict_during_prefill must be True or False, got 1"),
    ],
)
def test_a_bad_value_is_refused_by_name_at_construction(values, error, message):
    with pytest.raises(error, match=message):
        H2OConfig(**values)


def test_the_smallest_cache_keeps_one_token():
    assert H2OConfig(budget=1, n_sink=0, grace=0).budget == 1


@pytest.mark.parametrize(("budget", "grace"), [(512, 128), (64, 16), (7, 1)])
def test_the_recent_window_is_a_quarter_of_the_budget(budget, grace):
    assert H2OConfig(budget=budget).grace == grace
    assert H2OConfig(budget=budget) == H2OConfig(budget=budget, grace=grace)


def test_it_is_immutable_and_hashable():
    config = H2OConfig()
    with pytest.raises(AttributeError):
        config.budget = 3
    assert hash(config) == hash(H2OConfig())


def test_the_places_for_old_sums_are_a_share_of_those_for_heavy_hitters():
    places = {share: H2OConfig(budget=64, n_sink=4, grace=16, long_share=share).n_long for share in (0, 0.5, 0.99, 1)}
    assert places == {0: 0, 0.5: 22, 0.99: 43, 1: 44}
