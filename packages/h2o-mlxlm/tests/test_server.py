"""``h2o-mlxlm server``: mlx_lm's server, with H2O on in every request, and a thread that no request can end."""

import copy
import json
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from http.server import ThreadingHTTPServer
from threading import Thread
from urllib.request import urlopen

import huggingface_hub.utils._cache_manager
import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models import mamba
from mlx_lm.server import APIHandler

import h2o_mlxlm.cli.serving
from h2o_core import H2OConfig
from h2o_mlxlm import H2OKVCache, load, make_prompt_cache
from h2o_mlxlm.cli import flags, main, server
from h2o_mlxlm.cli.serving import PromptCache, start

CONFIG = H2OConfig(budget=12, n_sink=2, grace=3)
SMALL = ["--budget", "12", "--n-sink", "2", "--grace", "3", "--max-tokens", "8", "--prefill-step-size", "16"]
LONG = "hello world, " * 6


def our_parser():
    commands = flags.Parser(prog="h2o-mlxlm").add_subparsers(parser_class=flags.Parser)
    server.add_to(commands)
    return commands.choices["server"]


def free_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--positions", "auto"], "--positions auto is not for a server"),
        (["--budget", "4", "--grace", "3"], "n_sink + grace must be below budget"),
        (["--model", "/no/such/folder"], "no model folder at /no/such/folder"),
        (["--scorer", "kvzip"], "--scorer kvzip needs reconstruction, which generate alone makes"),
        (["--port", "70000"], "must be between 0 and 65535, got 70000"),
        (["--prompt-cache-bytes", "much"], "--prompt-cache-bytes"),
        (["--prefill-step-size", "0"], "--prefill-step-size"),
        (["--chat-template-args", "["], "must be a JSON object"),
        (["--budget", "1KB"], "--budget: 1000 bytes hold no token"),
        (["--max-kv-size", "4"], "--max-kv-size can't be used with an H2O cache"),
    ],
)
def test_bad_input_is_one_line_at_the_start(arguments, part, tiny_folder, capsys):
    try:
        code = main(["server", "--model", str(tiny_folder), "--log-level", "CRITICAL", *arguments])
    except SystemExit as exit_:
        code = exit_.code
    assert code == 2
    assert part in capsys.readouterr().err.splitlines()[-1]


def test_a_port_that_is_taken_is_one_line(tiny_folder, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main(["server", "--model", str(tiny_folder), "--port", port, "--log-level", "CRITICAL"]) == 2
    assert "in use" in capsys.readouterr().err.splitlines()[-1]


class Service:
    """A server in this process, and what its batches held after each of their steps."""

    def __init__(self, responses, port):
        self.responses, self.port = responses, port
        self.generators, self.kinds, self.kept, self.evicted, self.n_bytes = [], set(), 0, 0, 0

    def look(self, generator):
        if generator not in self.generators:
            self.generators.append(generator)
        for batch in (generator._prompt_batch, generator._generation_batch):
            for cache in map(copy.copy, batch.prompt_cache):
                self.kinds.add(type(cache))
                self.kept = max(self.kept, cache.size())
                self.evicted = max(self.evicted, *mx.array(cache.evictions).reshape(-1).tolist(), 0)
                self.n_bytes = max(self.n_bytes, cache.nbytes)

    def request(self, path="/v1/completions", body=None, raw=None, **fields):
        """Status and answer of one request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = raw if raw is not None else json.dumps(fields if body is None else body)
        connection.request("POST", path, data)
        answer = connection.getresponse()
        text = answer.read().decode()
        return answer.status, json.loads(text) if text.startswith("{") else text

    def tokens(self, prompt, **fields):
        """Tokens of the answer to a prompt, and how many of the prompt's were found in a cache."""
        status, answer = self.request(prompt=prompt, logprobs=True, **fields)
        assert status == 200, answer
        tokens = [token["id"] for token in answer["choices"][0]["logprobs"]["content"]]
        return tokens, answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@contextmanager
def service(folder, *arguments):
    args = our_parser().parse_args([*SMALL, *arguments])
    args.model = None if folder is None else str(folder)
    responses = start(args)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(APIHandler, responses, system_fingerprint="test"))
    thread = Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    running = Service(responses, httpd.server_address[1])
    step = BatchGenerator._next

    def watched(generator):
        answers = step(generator)
        running.look(generator)
        return answers

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BatchGenerator, "_next", watched)
            patch.setattr(APIHandler, "log_message", lambda *_: None)
            yield running
            assert responses.is_healthy
    finally:
        httpd.shutdown()
        httpd.server_close()
        responses.stop_and_join()


@pytest.fixture(scope="module")
def tiny(tiny_folder):
    return load(str(tiny_folder))


def go_on(model, caches, tokens, n=8):
    """Greedy tokens, the prompt fed as mlx_lm feeds it."""
    made = generate_step(mx.array(tokens), model, prompt_cache=caches, max_tokens=n, prefill_step_size=16)
    return [token for token, _ in made]


@pytest.mark.parametrize("fields", [{}, {"seed": 1}], ids=["in a batch", "alone"])
def test_an_answer_is_that_of_our_cache(fields, tiny, tiny_folder):
    model, tokenizer = tiny
    caches = make_prompt_cache(model, CONFIG)
    expected = go_on(model, caches, tokenizer.encode(LONG))
    with service(tiny_folder) as running:
        kept = kept_caches(running)
        tokens, _ = running.tokens(LONG, **fields)
    assert tokens == expected
    assert caches[0].evictions > 20
    last = kept[-1]
    for cache, other in zip(last, caches, strict=True):
        assert type(cache) is H2OKVCache
        assert (cache.tokens_seen, cache.tokens_kept) == (other.tokens_seen, 12)
        assert cache.kept_positions.tolist() == other.kept_positions.tolist()
        assert mx.allclose(cache.scores, other.scores, atol=1e-4)
    if not fields:
        assert running.kinds == {H2OKVCache}
        assert running.kept == 12


def kept_caches(running):
    """Every list of caches that the server puts aside, in order."""
    kept, insert = [], running.responses.prompt_cache.insert_cache

    def watched(model, tokens, caches, **more):
        kept.append([copy.copy(c) for c in caches])
        insert(model, tokens, caches, **more)

    running.responses.prompt_cache.insert_cache = watched
    return kept


def feed(model, caches, tokens):
    for at in range(0, len(tokens), 16):
        model(mx.array([tokens[at : at + 16]]), cache=caches)
        mx.eval([c.state for c in caches])


def test_a_second_turn_goes_on_from_the_first(tiny, tiny_folder):
    """From the cache put aside before the first prompt's last token: what evictions left there, and the rest."""
    model, tokenizer = tiny
    first, second = tokenizer.encode(LONG), tokenizer.encode(LONG + "again")
    with service(tiny_folder) as running:
        assert running.tokens(LONG)[1] == 0
        got, cached = running.tokens(LONG + "again")
    assert cached == len(first) - 1
    caches = make_prompt_cache(model, CONFIG)
    feed(model, caches, first[:-1])
    assert caches[0].evictions > 20
    assert got == go_on(model, caches, second[cached:])


def test_one_request_at_a_time_goes_on_from_the_answer(tiny, tiny_folder):
    """A seed makes mlx_lm serve it apart from all batches, from the same store."""
    model, tokenizer = tiny
    z = tokenizer.convert_tokens_to_ids("z")
    with service(tiny_folder) as running:
        assert running.tokens(LONG, seed=1, logit_bias={z: 1000})[0] == [z] * 8
        got, cached = running.tokens(LONG + "z" * 8 + "again", seed=1)
    first, second = tokenizer.encode(LONG), tokenizer.encode(LONG + "z" * 8 + "again")
    assert cached == len(first) + 8
    caches = make_prompt_cache(model, CONFIG)
    feed(model, caches, first[:-1])
    for token in (first[-1], *[z] * 8):
        feed(model, caches, [token])
    assert got == go_on(model, caches, second[cached:])


def test_a_prompt_that_a_cache_holds_whole_is_answered(tiny_folder):
    """mlx_lm's own store would leave nothing to feed, and the thread that answers would end."""
    with service(tiny_folder) as running:
        before, cached = running.tokens("hello")
        running.tokens("hello hello")
        again, cached = running.tokens("hello")
        assert again == before
        assert cached > 0
        for fields in ({}, {"seed": 1}):
            assert running.tokens("hello", **fields)[0] == before
    store = PromptCache()
    store.insert_cache("model", [1, 2, 3], make_prompt_cache_of_none())
    assert store.fetch_nearest_cache("model", [1, 2, 3]) == (None, [1, 2, 3])
    assert store.fetch_nearest_cache("model", [1, 2, 3, 4])[1] == [4]


def make_prompt_cache_of_none():
    return [H2OKVCache(CONFIG)]


def test_a_budget_of_memory_is_for_each_conversation(tiny_folder):
    with service(tiny_folder, "--budget", "20KB", "--grace", "8") as running:
        running.tokens(LONG * 4)
    assert 0 < running.n_bytes * 2 <= 20_000
    assert running.evicted > 0


@pytest.fixture(scope="module")
def second_folder(tiny_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("second")
    for file in tiny_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.fixture(scope="module")
def mamba_folder(second_folder, tmp_path_factory):
    """A model without attention, which loads, but which has no cache that H2O could bound."""
    folder = tmp_path_factory.mktemp("mamba")
    for file in second_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = {
        "model_type": "mamba",
        "vocab_size": 300,
        "hidden_size": 16,
        "intermediate_size": 32,
        "state_size": 4,
        "num_hidden_layers": 1,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 2,
    }
    model = mamba.Model(mamba.ModelArgs.from_dict(config))
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_named_in_a_request_has_our_caches_too(tiny_folder, second_folder):
    with service(tiny_folder) as running:
        mine, _ = running.tokens(LONG)
        other, cached = running.tokens(LONG, model=str(second_folder))
        assert (other, cached) == (mine, 0)
        assert len(running.generators) == 2
        assert running.kinds == {H2OKVCache}
        assert running.tokens(LONG)[0] == mine


def test_a_model_that_can_not_have_them_is_an_error_each_time(tiny_folder, mamba_folder):
    with service(tiny_folder) as running:
        for _ in range(2):
            status, answer = running.request(prompt="hello", model=str(mamba_folder))
            assert status == 404
            assert "no layer of mamba has a full attention cache to bound" in answer["error"]
        status, answer = running.request(prompt="hello", model="/no/such/folder")
        assert (status, answer["error"]) == (404, "no model folder at /no/such/folder")
        status, answer = running.request(prompt="hello", draft_model=str(tiny_folder))
        assert status == 404
        assert "can't be used with an H2O cache" in answer["error"]
        assert len(running.tokens(LONG)[0]) == 8


@pytest.mark.parametrize(
    ("request_", "status", "part"),
    [
        ({"raw": "{"}, 400, "Invalid JSON in request body"),
        ({"body": [1]}, 400, "Request should be a JSON dictionary"),
        ({"body": {}}, 400, "Request did not contain a prompt"),
        ({"body": {}, "path": "/v1/chat/completions"}, 400, "Request did not contain messages"),
        ({"body": {"prompt": "a", "max_tokens": 0}}, 400, "max_tokens must be at least 1"),
        ({"body": {"prompt": "a", "temperature": "warm"}}, 400, "temperature must be of type"),
        ({"body": {"prompt": "a", "top_p": 2}}, 400, "top_p must be at most 1"),
        ({"body": {"prompt": "a"}, "path": "/v1/nothing"}, 404, "Not Found"),
        (
            {"body": {"messages": [{"role": "system", "content": "refuse"}]}, "path": "/v1/chat/completions"},
            404,
            "no system",
        ),
    ],
    ids=str,
)
def test_a_malformed_request_gets_mlx_lms_error(request_, status, part, one_service):
    got, answer = one_service.request(**request_)
    assert got == status
    assert part in (answer if isinstance(answer, str) else answer["error"])


def test_a_model_that_was_not_named_is_listed(tiny_folder, tmp_path, monkeypatch):
    # mlx_lm drops the request where there is no folder of the hub's.
    monkeypatch.setattr(huggingface_hub.utils._cache_manager, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(h2o_mlxlm.cli.serving, "find", lambda name: name or str(tiny_folder))
    with service(None) as running, urlopen(f"http://127.0.0.1:{running.port}/v1/models") as answer:
        assert [model["id"] for model in json.load(answer)["data"]] == [str(tiny_folder)]


@pytest.fixture(scope="module")
def one_service(tiny_folder):
    with service(tiny_folder) as running:
        yield running


def test_a_client_that_hangs_up_frees_its_slot(tiny_folder):
    with service(tiny_folder) as running:
        body = json.dumps({"prompt": LONG, "stream": True, "max_tokens": 100_000}).encode()
        with socket.create_connection(("127.0.0.1", running.port)) as client:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n"
            client.sendall(head.encode() + body)
            while b"data: " not in client.recv(4096):
                pass
            (generator,) = running.generators
            assert len(generator._generation_batch) == 1
        end = time.monotonic() + 30
        while len(generator._generation_batch) and time.monotonic() < end:
            time.sleep(0.05)
        assert len(generator._generation_batch) == 0
        assert generator.prompt_cache_nbytes == 0
        assert len(running.tokens("hello")[0]) == 8


def test_as_a_process_it_serves_until_interrupted(tiny_folder):
    port = free_port()
    command = [sys.executable, "-m", "h2o_mlxlm", "server", "--model", str(tiny_folder), "--port", str(port), *SMALL]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        running = Service(None, port)
        for _ in range(600):
            try:
                status, answer = running.request(prompt=LONG)
                break
            except OSError:
                time.sleep(0.1)
        assert status == 200
        assert answer["usage"]["completion_tokens"] == 8
    finally:
        process.send_signal(2)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err
    assert "CPU back end: weights as float32" in err


def test_rows_are_quantised_by_our_caches_alone(make_folder):
    """mlx_lm would quantise later, one request at a time, if it knew of the flag."""
    flags_ = ["--model", str(make_folder(head_dim=32)), *SMALL, "--kv-bits", "8", "--kv-group-size", "32"]
    responses = start(our_parser().parse_args(flags_))
    try:
        provider = responses.model_provider
        assert provider.cli_args.kv_bits is None
        assert {cache.storage["kv_bits"] for cache in provider.model.make_cache()} == {8}
    finally:
        responses.stop_and_join()
