"""The server with the real models and the openai client: conversations side by side, and what they may cost."""

import copy
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.server import ThreadingHTTPServer
from threading import Thread

import mlx.core as mx
import openai
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.server import APIHandler

from h2o_mlxlm import H2OKVCache
from h2o_mlxlm.cli import flags, server
from h2o_mlxlm.cli.serving import start

from .conftest import MODELS, VERSE

BUDGET, TOKENS = 32, 6
# How far apart a log probability of the same token may lie, alone and in a batch.
LOGPROB = 1e-3
TOPICS = ["rivers", "lighthouses", "bread", "chess", "volcanoes", "violins", "bees", "glaciers"]
TURNS = ["{opening}Tell me something about {}.", "Why is that so?", "Name one more fact about {} and say who found it."]


class Seen:
    """What was held after each step of a batch, looked at in the thread that runs it."""

    def __init__(self, provider):
        # Taken now: a request that is refused leaves the provider without a model until the next.
        args, self.ends = provider.model.args, provider.tokenizer.eos_token_ids
        # A slot of every layer and head: float32 key and value, score, total and position.
        self.slot = args.num_hidden_layers * args.num_key_value_heads * (2 * args.head_dim + 3) * 4
        self.kinds, self.most, self.kept, self.evicted, self.scores_were_there = set(), 0, 0, 0, True
        self.generator = None

    def look(self, generator):
        self.generator = generator
        for batch in (generator._prompt_batch, generator._generation_batch):
            self.most = max(self.most, len(batch))
            held = [copy.copy(c) for c in batch.prompt_cache]  # a copy ends its open call, the cache does not
            self.kinds |= {type(c) for c in held}
            if not held:
                continue
            assert sum(c.nbytes for c in held) <= len(batch) * ((BUDGET + 1) * self.slot + 1000)
            self.kept = max(self.kept, *(c.size() for c in held))
            self.evicted = max(self.evicted, mx.array(held[0].evictions).max().item())
            last = held[-1]
            if last.size():
                sums = mx.where(last.kept_positions >= 0, last.totals, 0).sum(axis=-1)
                self.scores_were_there &= (sums > 0).all().item()


@pytest.fixture(scope="module", params=MODELS)
def running(request):
    """For each of the models, loaded by the server itself: the server's thread, a client, and what was seen."""
    commands = flags.Parser(prog="h2o-mlxlm").add_subparsers(parser_class=flags.Parser)
    server.add_to(commands)
    line = ["--budget", str(BUDGET), "--max-tokens", str(TOKENS), "--prompt-cache-size", "100"]
    line += ["--model", MODELS[request.param]] if MODELS[request.param] else []
    responses, step = start(commands.choices["server"].parse_args(line)), BatchGenerator._next
    seen = Seen(responses.model_provider)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(APIHandler, responses, system_fingerprint="test"))
    Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01}).start()

    def watched(generator):
        answers = step(generator)
        seen.look(generator)
        return answers

    url = f"http://127.0.0.1:{httpd.server_address[1]}/v1"
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            openai.OpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client,
        ):
            patch.setattr(BatchGenerator, "_next", watched)
            patch.setattr(APIHandler, "log_message", lambda *_: None)
            yield responses, client, seen
    finally:
        httpd.shutdown()
        httpd.server_close()
        responses.stop_and_join()


def converse(client, opening, topic):
    """Three turns, the opening before the first, each with all that was said before.

    Returns the answers, and the two likeliest tokens at each step.
    """
    messages, answers = [], []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn.format(topic, opening=opening)})
        got = client.chat.completions.create(
            model="default_model", messages=messages, temperature=0, logprobs=True, top_logprobs=2
        )
        (choice,) = got.choices
        steps = [sorted(((x.logprob, x.token) for x in c.top_logprobs), reverse=True) for c in choice.logprobs.content]
        answers.append((choice.message.content, steps, got.usage))
        messages.append({"role": "assistant", "content": choice.message.content})
    return answers


def equal_or_tied(topic, ours, theirs):
    """Say whether two answers are equal; if not, they must part at a near-tie, which is named."""
    if ours[0] == theirs[0]:
        return True
    for at, (a, b) in enumerate(zip(ours[1], theirs[1], strict=False)):
        if a[0][1] != b[0][1]:
            print(f"{topic}: token {at} is a near-tie of {a} and {b}")
            assert {token for _, token in a} == {token for _, token in b}
            assert b[0][0] - b[1][0] < 2 * LOGPROB
            return False
    raise AssertionError(f"{topic}: {ours[0]!r} and {theirs[0]!r} from the same tokens")


def test_eight_conversations_of_three_turns(running):
    responses, client, seen = running
    # The small model's template adds nothing, and its first turn has to be longer than the budget too.
    talk = partial(converse, client, f"{VERSE} " if responses.cli_args.model == MODELS["mistral"] else "")
    store = responses.prompt_cache
    with ThreadPoolExecutor(len(TOPICS)) as pool:
        together = list(pool.map(talk, TOPICS))
    assert seen.kinds == {H2OKVCache}
    assert seen.most > 2  # they did run together
    assert seen.kept == BUDGET
    assert seen.evicted > BUDGET  # far past it
    assert seen.scores_were_there
    # Two caches a turn, before its last token and after its answer, none of more than the budget.
    assert len(store) <= 2 * len(TOPICS) * len(TURNS)
    assert store.nbytes <= len(store) * ((BUDGET + 1) * seen.slot + 1000)
    for turn in (1, 2):
        assert all(answers[turn][2].prompt_tokens_details.cached_tokens > BUDGET for answers in together)

    store.trim_to(n_sequences=0)
    equal = 0
    for topic, ours in zip(TOPICS, together, strict=True):
        print(topic, [text for text, *_ in ours])
        theirs = talk(topic)
        equal += all(equal_or_tied(topic, a, b) for a, b in zip(ours, theirs, strict=True))
    assert equal >= len(TOPICS) - 2


def test_a_stream_is_the_same_answer(running):
    _, client, _ = running
    ask = partial(
        client.chat.completions.create,
        model="default_model",
        messages=[{"role": "user", "content": "Name a river."}],
        temperature=0,
    )
    stream = list(ask(stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert text == ask().choices[0].message.content
    assert stream[-1].usage.completion_tokens == TOKENS


def test_errors_are_mlx_lms(running):
    responses, client, _ = running
    ask = partial(client.chat.completions.create, messages=[{"role": "user", "content": "Name a river."}])
    for kind, said, request in (
        (openai.BadRequestError, "max_tokens must be at least 1", {"max_tokens": 0}),
        (openai.BadRequestError, "temperature must be at least 0", {"temperature": -1}),
        (openai.NotFoundError, "no model folder at /no/such", {"model": "/no/such"}),
        (openai.NotFoundError, "draft_model='any' can't be used", {"extra_body": {"draft_model": "any"}}),
    ):
        with pytest.raises(kind) as refused:
            ask(**{"model": "default_model"} | request)
        assert refused.value.body.startswith(said)
    assert responses.is_healthy


def eventually(holds, seconds=120):
    """Whether it holds before the time is over."""
    end = time.monotonic() + seconds
    while not (held := holds()) and time.monotonic() < end:
        time.sleep(0.05)
    return held


def test_a_client_that_hangs_up_frees_its_slot(running):
    responses, client, seen = running
    # A refused request unloads the model, and mlx_lm runs the next one alone, in no batch.
    hello = [{"role": "user", "content": "Hello."}]
    client.chat.completions.create(model="default_model", messages=hello, max_tokens=1)
    stored = len(responses.prompt_cache)
    stream = client.chat.completions.create(
        model="default_model",
        messages=[{"role": "user", "content": "Tell me a story without end."}],
        stream=True,
        max_tokens=100_000,
        # It must not end by itself before anybody looks.
        logit_bias={str(token): -100 for token in seen.ends},
    )
    next(iter(stream))
    # The text comes from another thread than this one looks from.
    assert eventually(lambda: seen.generator is not None and len(seen.generator._generation_batch) == 1)
    stream.close()
    assert eventually(lambda: len(seen.generator._generation_batch) == 0)
    assert seen.generator.prompt_cache_nbytes == 0
    # What was put aside before the last token of its prompt.
    assert len(responses.prompt_cache) == stored + 1


def test_a_chat_is_coherent_far_past_the_budget():
    # SmolLM2 alone: the small model has never seen a chat.
    lines = ["My name is Anna and I live in Norway.", "Name one large city in that country.", "What is 2 + 2?"]
    command = [sys.executable, "-m", "h2o_mlxlm", "chat", "--budget", "64", "--max-tokens", "24"]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, check=True)
    print(done.stdout)
    kept = re.findall(r"kept (\d+) of (\d+) tokens", done.stdout)
    assert [int(k) for k, _ in kept[1:]] == [64, 64]
    assert int(kept[-1][1]) > 2 * 64
    assert "4" in done.stdout.split("\u203a")[3]
