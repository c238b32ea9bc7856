"""Generate with H2O on a model that is sharded by heads over the ranks of ``mlx.launch``, and print what each kept.

    mlx.launch -n 3 --backend ring tests/integration/ranks.py MODEL NEW_TOKENS PROMPT_TOKEN...

MODEL is a folder, or ``smollm2``. Each rank prints one JSON object.
"""

import json
import sys

import h2o_mlxlm

SETTINGS = {"budget": 24, "n_sink": 2, "grace": 6}


def generated(model, prompt, n_new, rank=0):
    """Tokens with their lead over the second best, and of each layer evictions and the positions kept."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    caches = h2o_mlxlm.make_prompt_cache(model, h2o_mlxlm.H2OConfig(**SETTINGS))
    steps = []
    for token, logprobs in generate_step(mx.array(prompt), model, max_tokens=n_new, prompt_cache=caches):
        second, first = sorted(mx.topk(logprobs, 2).tolist())
        steps.append((token, first - second))
    return {
        "rank": rank,
        "steps": steps,
        "evictions": [c.evictions for c in caches],
        "kept": [c.kept_positions[0].tolist() for c in caches],
    }


def main(name, n_new, *prompt):
    model, _ = h2o_mlxlm.load(None if name == "smollm2" else name)

    import mlx.core as mx

    group = mx.distributed.init()
    model.shard(group)
    found = generated(model, [int(token) for token in prompt], int(n_new), group.rank())
    # In one write, so that the ranks' lines don't run into each other.
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
