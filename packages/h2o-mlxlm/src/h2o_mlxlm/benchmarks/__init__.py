"""What a cache costs, in time and memory, beside mlx_lm's own in the same process.

A module for each level (``step``, ``prefill``, ``model``, ``long``, ``memory``, ``slopes``) yields rows: plain
dictionaries, units in the names. Nothing here prints or parses. Only mx calls, so the same code runs on CPU,
Metal and CUDA; importing a module does not import mlx.
"""
