"""The HTTP client against a real local server: what a status, a header or a broken answer becomes."""

import socket
import threading
from email.utils import formatdate
from typing import Any

import pytest

from kb_pipeline.errors import Fatal, KbError, Misconfigured, RateLimited, Rejected, TooLarge, Transient
from kb_pipeline.http import SHOWN_CHARS, HttpClient, Reply, error_of, scrub
from kb_pipeline_tests.adapters.embedding_server import EmbeddingServer, Said, embedding_server

NOON = 1_700_000_000


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def server():
    with embedding_server() as s:
        yield s


def ask(server: EmbeddingServer, said: Said, **options: Any) -> Any:
    server.behaviour = lambda _: said
    with HttpClient(server.url, **options) as http:
        return http.post_json("embeddings", {"a": 1})


def error(server: EmbeddingServer, said: Said, **options: Any) -> KbError:
    with pytest.raises(KbError) as caught:
        ask(server, said, **options)
    return caught.value


def test_json_goes_both_ways_below_the_base_path(server):
    paths = []
    server.behaviour = lambda body: Said(body={"got": body})
    with HttpClient(server.url + "/", {"x-a": "1"}, translate=lambda r: paths.append(r.request) or error_of(r)) as http:
        assert http.post_json("embeddings", {"text": "文"}) == {"got": {"text": "文"}}
        assert http.get_json("models", {"limit": 2}) == {"got": {}}
    assert server.headers[0]["x-a"] == "1"
    assert paths == [f"POST {server.url}/embeddings", f"GET {server.url}/models"]


@pytest.mark.parametrize(
    ("status", "kind", "code"),
    [
        (400, Rejected, "rejected"),
        (401, Fatal, "unauthorized"),
        (402, Fatal, "quota_exceeded"),
        (403, Fatal, "unauthorized"),
        (404, Rejected, "not_found"),
        (408, Transient, "timeout"),
        (409, Transient, "server_error"),
        (413, TooLarge, "too_large"),
        (418, Rejected, "rejected"),
        (422, Rejected, "rejected"),
        (429, RateLimited, "rate_limited"),
        (500, Transient, "server_error"),
        (502, Transient, "endpoint_down"),
        (503, Transient, "overloaded"),
        (504, Transient, "endpoint_down"),
        (529, Transient, "overloaded"),
        (302, Fatal, "redirected"),
    ],
)
def test_each_status_has_one_consequence(server, status, kind, code):
    e = error(server, Said(status, {"error": {"message": "because"}}))
    assert (type(e), e.code) == (kind, code)
    if status != 302:
        assert "because" in e.message
    assert f"POST {server.url}/embeddings" in e.message


def test_nothing_is_retried(server):
    error(server, Said(429, {}, {"Retry-After": "0"}))
    error(server, Said(500, {}))
    assert len(server.requests) == 2


@pytest.mark.parametrize(
    "message",
    [
        "This model's maximum context length is 8192 tokens, however you requested 9000 tokens",
        "Invalid 'input': array too long. Expected an array with maximum length 2048",
        "batch size is invalid, it should not be larger than 10",
        "inputs must have less than 512 tokens",
        "the request exceeds the token limit",
        "输入文本过长",
    ],
)
@pytest.mark.parametrize("status", [400, 422])
def test_a_400_that_speaks_of_size_is_too_large(server, message, status):
    assert isinstance(error(server, Said(status, {"error": {"message": message}})), TooLarge)


@pytest.mark.parametrize("message", ["invalid input", "the text contains forbidden words", "model 'x' does not exist"])
def test_a_400_about_anything_else_is_rejected(server, message):
    assert type(error(server, Said(400, {"error": {"message": message}}))) is Rejected


@pytest.mark.parametrize("status", [429, 503, 529])
@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": "1.5"}, 1.5),
        ({"Retry-After": formatdate(NOON + 90, usegmt=True), "Date": formatdate(NOON, usegmt=True)}, 90.0),
        ({"Retry-After": formatdate(NOON - 90, usegmt=True), "Date": formatdate(NOON, usegmt=True)}, 0.0),
        ({"Retry-After-Ms": "250"}, 0.25),
        ({"X-RateLimit-Reset": "12"}, 12.0),
        ({"X-RateLimit-Reset": str(NOON + 30), "Date": formatdate(NOON, usegmt=True)}, 30.0),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "inf"}, None),
        ({}, None),
    ],
)
def test_retry_after_is_read_in_every_form(status, headers, seconds):
    e = error_of(Reply("GET x", status, {k.lower(): v for k, v in headers.items()}, b"{}"))
    assert isinstance(e, Transient)
    assert e.retry_after == seconds


@pytest.mark.parametrize("value", ["3", formatdate(4_000_000_000, usegmt=True)])
def test_retry_after_arrives_through_a_real_answer(server, value):
    e = error(server, Said(429, {}, {"Retry-After": value}))
    assert isinstance(e, RateLimited)
    assert e.retry_after == 3 if value == "3" else e.retry_after > 1e6


@pytest.mark.parametrize(
    ("said", "code"),
    [
        (Said(body=b'{"data": [{"ind'), "truncated"),
        (Said(body=b'{"data": [', cut=50), "truncated"),
        (Said(body=b"<html><body>Welcome</body></html>", headers={"Content-Type": "text/html"}), "not_json"),
        (Said(body=b""), "not_json"),
        (Said(body=b"gzip?", headers={"Content-Encoding": "gzip"}), "truncated"),
    ],
)
def test_a_broken_answer_is_temporary(server, said, code):
    e = error(server, said)
    assert (type(e), e.code) == (Transient, code)
    assert "Welcome" not in e.message


def test_a_closed_port_is_endpoint_down():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with HttpClient(f"http://127.0.0.1:{port}") as http, pytest.raises(Transient) as caught:
        http.get_json("models")
    assert caught.value.code == "endpoint_down"


def test_a_silent_server_is_a_timeout(server):
    release = threading.Event()
    server.behaviour = lambda _: release.wait(10) and Said(body={})
    with HttpClient(server.url, timeout_seconds=0.1) as http, pytest.raises(Transient) as caught:
        http.get_json("models")
    release.set()
    assert caught.value.code == "timeout"


def test_an_answer_that_dribbles_is_a_timeout():
    """Each byte comes in time, the whole never does: only the limit for the whole answer ends it."""
    listener = socket.create_server(("127.0.0.1", 0))
    stop = threading.Event()

    def dribble() -> None:
        with listener, listener.accept()[0] as s:
            s.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            while not stop.wait(0.02):
                try:
                    s.sendall(b" ")
                except OSError:
                    return

    thread = threading.Thread(target=dribble, daemon=True)
    thread.start()
    with HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", timeout_seconds=0.2) as http:
        with pytest.raises(Transient) as caught:
            http.get_json("models")
    stop.set()
    thread.join()
    assert caught.value.code == "timeout"


@pytest.mark.parametrize("url", ["localhost:1", "ftp://h/x", "http://[::1"])
def test_a_wrong_url_is_misconfigured(url):
    with pytest.raises(Misconfigured), HttpClient(url) as http:
        http.get_json("models")


@pytest.mark.parametrize("key", ["sk-密钥", "sk-a\nb"])
def test_a_key_that_no_header_can_carry_is_misconfigured(server, key):
    with pytest.raises(Misconfigured) as caught, HttpClient(server.url, {"authorization": f"Bearer {key}"}) as http:
        http.get_json("models")
    assert key not in caught.value.message


def test_an_adapter_decides_by_vendor_codes(server):
    def translate(reply: Reply) -> KbError | None:
        code = reply.json().get("code", 0)
        return RateLimited("slow down") if code == 99991400 else None if code == 0 else error_of(reply)

    limited = error(server, Said(200, {"code": 99991400}), translate=translate)
    assert isinstance(limited, RateLimited)
    assert ask(server, Said(400, {"code": 0, "x": 1}), translate=translate) == {"code": 0, "x": 1}


def test_what_a_vendor_echoes_is_shown_without_credentials(server):
    key = "sk-proj-abcdefghijklmnop1234"
    message = f"Incorrect API key provided: {key}. See https://s3.example.com/o?X-Amz-Signature=deadbeef&e=1"
    e = error(server, Said(401, {"error": {"message": message}}), headers={"authorization": f"Bearer {key}"})
    assert key not in e.message
    assert "deadbeef" not in e.message
    assert "https://s3.example.com/o?..." in e.message


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("Authorization: Bearer abcdefghijk", "abcdefghijk"),
        ('{"api_key": "verysecret"}', "verysecret"),
        ("postgres://user:hunter22@host/x", "hunter22"),
        ("used AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE"),
        ("token=abcd1234 is expired", "abcd1234"),
        ("my-own-password failed", "my-own-password"),
    ],
)
def test_scrub_removes(text, secret):
    assert secret not in scrub(text, ("my-own-password",))


def test_scrub_leaves_what_explains_the_error():
    text = "too many tokens: 9000 > 8192 for model text-embedding-3-small at https://api.example.com/v1"
    assert scrub(text) == text
    assert len(scrub("x" * 10_000)) <= SHOWN_CHARS + 3


def test_connections_are_reused_across_threads(server):
    with HttpClient(server.url) as http:
        threads = [threading.Thread(target=http.post_json, args=("e", {"input": [str(i)]})) for i in range(8)]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
    assert sorted(r["input"][0] for r in server.requests) == list("01234567")
