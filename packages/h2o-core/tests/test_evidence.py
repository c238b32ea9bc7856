"""What is gathered of a call: the last rows, changed probabilities, and no more than a scorer asks for."""

import mlx.core as mx
import pytest

from h2o_core import Evidence, H2OConfig, Mass, admit, attend, attention, gather, init, observe, visible
from h2o_core.evidence import last_rows

B, H, G, N, OLD, D = 3, 2, 2, 7, 4, 8
LENGTHS = mx.array([7, 2, 0], mx.int32)


def made(seed=0):
    keys = mx.random.split(mx.random.key(seed), 3)
    q = 2 * mx.random.normal((B, H * G, N, D), key=keys[0])
    k, v = (2 * mx.random.normal((B, H, OLD + N, D), key=key) for key in keys[1:])
    return q, k, v


def probabilities(q, k, shown, sinks=None):
    """Softmax in full, [B, Hq, N, C]."""
    logits = mx.where(shown, (q * 0.3) @ mx.repeat(k, G, axis=1).swapaxes(-1, -2), -mx.inf)
    if sinks is not None:
        extra = mx.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
        return mx.softmax(mx.concatenate([logits, extra], axis=-1), axis=-1)[..., :-1]
    return mx.softmax(logits, axis=-1)


@pytest.mark.parametrize("block", [1 << 20, 100])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kind", ["causal", "mask", "padded", "padded causal"])
@pytest.mark.parametrize("n_rows", [1, 3, 20])
def test_the_last_rows_are_those_of_the_last_real_queries(monkeypatch, block, with_sinks, kind, n_rows):
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", block)
    q, k, _ = made()
    sinks = mx.array([0.5, -1.0, 2.0, 0.0]) if with_sinks else None
    own = mx.arange(OLD + N) <= mx.arange(N)[:, None] + OLD
    p = probabilities(q, k, own, sinks).reshape(B, H, G, N, -1).mean(axis=2)
    heads = H if "padded" in kind else 1  # a mask may differ between heads
    mask = "causal" if "causal" in kind else mx.broadcast_to(own, (B, heads, N, OLD + N))
    found = last_rows(n_rows, q, k, 0.3, mask, LENGTHS if "padded" in kind else None, sinks)
    m = min(n_rows, N)
    assert found.shape == (B, H, m, OLD + N)
    for b, real in enumerate(LENGTHS.tolist() if "padded" in kind else [N] * B):
        seen = min(m, real)
        assert mx.allclose(found[b, :, m - seen :], p[b, :, real - seen : real], atol=1e-6)
        assert not found[b, :, : m - seen].any()


def test_one_query_is_its_own_mass():
    q, k, v = made()
    config = H2OConfig(64, scorer="tova")
    _, mass = attend(q[:, :, :1], k, v, 0.3)
    state, _ = admit(init(B, H, scorer=config.scorer), OLD + N)
    evidence = gather(config, state, mass, q[:, :, :1], k, v, 0.3)
    assert mx.array_equal(evidence.rows[:, :, 0], mass.total)
    assert evidence._replace(mass=None, rows=None) == Evidence()


@pytest.mark.parametrize("lengths", [None, LENGTHS])
@pytest.mark.parametrize("block", [1 << 20, 100])
def test_noise_is_on_the_logits_and_each_query_still_adds_one(monkeypatch, lengths, block):
    """softmax((q·k + ζ) / τ), summed with decay, without log p of anything."""
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", block)
    from h2o_core.scorers.noise import uniform

    q, k, v = made(3)
    config = H2OConfig(64, decay=0.9, scorer={"name": "keyformer", "tau": 0.5, "tau_end": 0.5, "seed": 4})
    state, _ = admit(admit(init(B, H), OLD)[0], N, lengths)
    mask = visible(state, N, lengths)
    evidence = gather(config, state, None, q, k, v, 0.3, mask, lengths)
    for b, real in enumerate([N] * B if lengths is None else lengths.tolist()):
        at = mx.arange(OLD, OLD + N)[:, None]
        for h in range(H):
            decayed, total = mx.zeros(OLD + N), mx.zeros(OLD + N)
            for g in range(h * G, h * G + G):
                noise = -mx.log(-mx.log(uniform(4, mx.array(g), at, mx.arange(OLD + N))))
                logits = (q[b, g] * 0.3) @ k[b, h].T
                p = mx.softmax(mx.where(mx.arange(OLD + N) <= at, (logits + noise) / 0.5, -mx.inf), axis=-1)[:real]
                total += p.sum(axis=0) / G
                decayed += (0.9 ** mx.arange(real - 1, -1, -1)[:, None] * p).sum(axis=0) / G
            assert mx.allclose(evidence.mass.total[b, h], total, atol=1e-5)
            assert mx.allclose(evidence.mass.decayed[b, h], decayed, atol=1e-5)


def test_noise_leaves_what_sink_logits_took():
    q, k, v = made(5)
    config, sinks = H2OConfig(64, decay=0.9, scorer="keyformer"), mx.array([6.0, 5.0, 7.0, 4.0])
    state, _ = admit(init(B, H), OLD + N)
    _, mass = attend(q, k, v, 0.3, 0.9, "causal", sinks=sinks)
    noisy = gather(config, state, None, q, k, v, 0.3, "causal", sinks=sinks).mass
    assert (mass.total.sum(axis=-1) < N - 1).all()
    assert mx.allclose(noisy.total.sum(axis=-1), mass.total.sum(axis=-1), rtol=1e-4)
    assert not mx.allclose(noisy.total, mass.total, rtol=0.1)


def test_evidence_of_the_first_slots_is_enough():
    """An adapter has more slots than it shows."""
    q, k, v = made(1)
    config = H2OConfig(64, scorer="expected_attention")
    given = {"query_mean": mx.zeros((H * G, D)), "query_cov": mx.zeros((H * G, D, D))}
    state, _ = admit(init(B, H, scorer=config.scorer), OLD + N)
    evidence = gather(config, state, None, q, k, v, 0.3, "causal", given=given)
    from h2o_core import grow

    scores = observe(config, state, evidence, N).scores
    wider = observe(config, grow(state, 20), evidence, N).scores
    assert mx.allclose(wider[..., : OLD + N], scores)
    assert not wider[..., OLD + N :].any()


@pytest.mark.parametrize("scorer", [{"name": "morphkv", "window": 1024}, "keyformer"])
def test_one_block_of_probabilities_is_alive_at_a_time(monkeypatch, scorer):
    """Four heads of 1,024 queries and keys would be 16 MiB; a block is 256 KiB, and noise is some of them."""
    monkeypatch.setattr(attention, "BLOCK_ELEMENTS", 1 << 16)
    n, config = 1024, H2OConfig(64, scorer=scorer)
    q, k = (mx.random.normal((1, h, n, 8), key=mx.random.key(h)) for h in (4, 1))
    state, _ = admit(init(1, 1, scorer=config.scorer), n)
    _, mass = attend(q, k, k, 0.3, mask="causal")
    mx.eval(q, k, state, mass)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    evidence = gather(config, state, mass, q, k, k, 0.3, "causal")
    mx.eval(evidence)
    held = sum(x.nbytes for x in (evidence.rows,) if x is not None)
    # The rows that were asked for are held, and once more while they are put together.
    assert mx.get_peak_memory() - before < 2 * held + (4 << 20)


def test_a_plain_scorer_costs_nothing():
    q, k, v = made()
    config = H2OConfig(64)
    _, mass = attend(q, k, v, 0.3, mask="causal")
    evidence = gather(config, init(B, H), mass, q, k, v, 0.3, "causal")
    assert evidence == Evidence(mass)
    with pytest.raises(ValueError, match="scorer 'h2o' takes no input filters"):
        gather(config, init(B, H), mass, q, k, v, 0.3, "causal", given={"filters": k})


def test_evidence_that_is_missing_is_named():
    state, _ = admit(init(B, H), N)
    with pytest.raises(ValueError, match=r"scorer 'tova' needs rows, got none: pass what h2o_core\.gather returns"):
        observe(H2OConfig(64, scorer="tova"), state, Evidence(), N)
    with pytest.raises(ValueError, match="scorer 'h2o' needs mass"):
        observe(H2OConfig(64), state, Evidence(), N)
    for name in ("cam", "keyformer", "tova"):
        with pytest.raises(ValueError, match=rf"scorer '{name}' needs more than mass: pass what h2o_core\.gather"):
            observe(H2OConfig(64, scorer=name), state, Mass(state.scores, state.totals), N)
    rows = Evidence(rows=mx.zeros((B, H, 1, N)))
    with pytest.raises(ValueError, match="'morphkv' keeps 1 arrays beside the scores, and the state has 0: make it"):
        observe(H2OConfig(64, scorer="morphkv"), state, rows, N)
