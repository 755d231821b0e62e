"""Requests that no client in good faith sends, and how to send them to any server.

    python -m tests.models.serving.hostile HOST PORT TOKEN AUTHORITY [NUMBER]

sends them to an nginx that runs in front of a server, and prints how it answered. TOKEN is a valid one, and AUTHORITY
the PEM file of the certificate that signs nginx's.
"""

import json
import random
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

POSTS = ("/v1/completions", "/v1/chat/completions", "/v1/classify", "/v1/embeddings")
ROUTES = (*POSTS, "/v1/models", "/v1/models/global", "/v1/reader")
STRANGE_NAMES = (
    *("../global", "..%2f..%2fetc%2fpasswd", "%2e%2e/%2e%2e/etc/passwd", "global/../secret-variant", "/etc/passwd"),
    *("global\0", "global\0.json", "glоbal", "ｇｌｏｂａｌ", "global​"),
    *("GLOBAL", " global", "global\n", "*", "secret-*"),
    *("variants/global", "file:///etc/passwd", "${jndi:ldap://x}", "{{7*7}}", "' OR 1=1 --", "a" * 199, "[a-z]*"),
)
NOT_JSON = (
    *(b"", b"{", b"nul", b"[1,]", b'{"model": "global"', b"\xff\xfe\x00", b'{"a":\x00}', b"'x'", b"{}{}", b"[]", b"7"),
)
NUMBERS = (
    *("NaN", "Infinity", "-Infinity", "1e999", "-1", "9" * 400, "9" * 5000, "1e400", "0.5", "true", '"7"', "-0.1"),
    "[]",
)
PENALTIES = ("presence_penalty", "frequency_penalty")
NUMERIC = (*PENALTIES, "max_tokens", "seed", "temperature", "top_p", "top_k", "n", "logprobs")
# Of these fields and numbers, those that ask for something.
MEANT = {("temperature", "0.5"), ("top_p", "0.5"), *((p, value) for p in PENALTIES for value in ("-1", "0.5", "-0.1"))}


@dataclass(frozen=True, kw_only=True)
class Hostile:
    """One request of a kind of attack.

    Attributes:
        pieces: of bytes, sent one after the other.
        pause: between them, in seconds.
        ends: whether the client says that it sends no more.
    """

    kind: str
    pieces: tuple[bytes, ...]
    pause: float = 0.0
    ends: bool = False


class Attacker:
    """Makes requests, from a seed of all that is drawn and a valid token."""

    def __init__(self, seed: int, token: str) -> None:
        self._rng, self._token = random.Random(seed), token
        self._kinds: list[Callable[[], Hostile]] = [
            *(self.bad_json, self.deep, self.numbers, self.too_long, self.strange_name, self.strange_path),
            *(self.wrong_token, self.wrong_method, self.wrong_type, self.truncated, self.not_http, self.wrong_fields),
        ]

    def requests(self, number: int, *, slow: int = 0) -> list[Hostile]:
        """This many requests of all kinds, of which some are slow."""
        found = [self._kinds[index % len(self._kinds)]() for index in range(number - slow)]
        return [*found, *(self.slow_body() if index % 2 else self.slow_head() for index in range(slow))]

    def bad_json(self) -> Hostile:
        body = self._pick(NOT_JSON)
        if self._rng.random() < 0.3:
            body = bytes(self._rng.randrange(256) for _ in range(self._rng.randrange(1, 200)))
        return self._post("bad_json", body)

    def deep(self) -> Hostile:
        depth, (opening, closing) = self._pick((300, 5000, 100_000)), self._pick((("[", "]"), ('{"a":', "}")))
        nested = opening * depth + "1" + closing * depth * self._pick((0, 1))
        return self._post("deep", f'{{"model": "global", "prompt": {nested}}}'.encode())

    def numbers(self) -> Hostile:
        field, value = self._pick(NUMERIC), self._pick(NUMBERS)
        if (field, value) in MEANT:
            value = "NaN"
        return self._post("numbers", f'{{"model":"global","prompt":"x","{field}":{value}}}'.encode(), POSTS[0])

    def too_long(self) -> Hostile:
        size = self._pick((3000, 200_000, 2_000_000))
        body = {"model": "global", "prompt": "a " * (size // 2)}
        if self._rng.random() < 0.3:
            body = {"model": "global", "prompt": ["x"] * 1000}
        if self._rng.random() < 0.3:
            head = self._head("POST", POSTS[0], [b"Content-Type: application/json", b"Transfer-Encoding: chunked"])
            text, size = json.dumps(body).encode(), 50_000
            parts = [text[start : start + size] for start in range(0, len(text), size)]
            chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in parts) + b"0\r\n\r\n"
            return Hostile(kind="too_long", pieces=(head + chunks,))
        return self._post("too_long", json.dumps(body).encode(), POSTS[0])

    def strange_name(self) -> Hostile:
        name = self._pick((*STRANGE_NAMES, "secret-variant", "round-3", "\ud800", ""))
        chat = {"messages": [{"role": "user", "content": "x"}]}
        shapes = {"prompt": "x"}, chat, {"input": "x"}, {"input": "x"}
        path, shape = self._pick(tuple(zip(POSTS, shapes, strict=True)))
        return self._post("strange_name", json.dumps({"model": name, **shape}).encode(), path)

    def strange_path(self) -> Hostile:
        tricks = (
            *("%2e%2e", "..", "%00", "%ff%fe", "%c0%ae%c0%ae", "secret-variant", "..%5c..%5c", "%252e%252e"),
            "g" * 3000,
        )
        prefix = self._pick(("/v1/models/", "/v1/", "/", "//", "/static/", "/v1/models/global?with=", "http://other/"))
        target = prefix + "/".join(self._pick(tricks) for _ in range(self._rng.randrange(1, 4)))
        return self._get("strange_path", target)

    def wrong_token(self) -> Hostile:
        headers = self._pick(
            (
                *([], [b"Authorization: Bearer wrong"], [b"Authorization: Basic Zm9vOmJhcg=="], [b"Authorization:"]),
                [f"Authorization: Bearer {self._token}x".encode()],
                [f"Authorization: Bearer {self._token}".encode()] * 2,
                [f"Authorization: Bearer {self._token}".encode(), b"Authorization: Bearer wrong"],
                *([b"Authorization: Bearer \xff\xfe"], [b"Authorization: Bearer " + b"a" * 8000], [b"X-Api-Key: x"]),
            )
        )
        return self._get("wrong_token", self._pick(ROUTES), headers)

    def wrong_method(self) -> Hostile:
        method = self._pick(("DELETE", "PUT", "PATCH", "TRACE", "OPTIONS", "HEAD", "CONNECT", "BREW", "post"))
        return self._get("wrong_method", self._pick((*ROUTES, "/", "/health")), method=method)

    def wrong_type(self) -> Hostile:
        kinds = (b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data; boundary=x", b"", b"json")
        headers = [b"Content-Type: " + self._pick(kinds), *self._pick(([], [b"Content-Type: application/json"]))]
        if self._rng.random() < 0.3:
            headers = [b"Content-Type: application/json", b"Content-Encoding: gzip"]
        return self._post("wrong_type", b'{"model":"global","prompt":"x"}', headers=headers)

    def truncated(self) -> Hostile:
        head = self._head("POST", POSTS[0], [b"Content-Type: application/json", b"Content-Length: 500"])
        return Hostile(kind="truncated", pieces=(head + b'{"model": "global"',), ends=True)

    def not_http(self) -> Hostile:
        bearer = f"Host: x\r\nAuthorization: Bearer {self._token}\r\n".encode()
        post = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + bearer
        attacks = (
            *(b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n" + bearer + b"\r\n"),
            *(b"GET / HTTP/1.1\r\n\r\n", b"GET /\x00 HTTP/1.1\r\n" + bearer + b"\r\n", b"\r\n\r\n\r\nhello\r\n\r\n"),
            b"GET / HTTP/1.1\r\n" + bearer + b"X: " + b"a" * 100_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\n" + bearer + b"Bad Header: x\r\n\r\n",
            post + b"Content-Length: -5\r\n\r\n",
            post + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
            post + b"Content-Length: " + b"9" * 300 + b"\r\n\r\n",
            post + b"Transfer-Encoding: chunked\r\n\r\nzz\r\nhello\r\n",
            post + b"Transfer-Encoding: chunked\r\n\r\nffffffffffffffffffff\r\nhello\r\n",
            post + b"Transfer-Encoding: gzip, chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            post + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            post + b"Expect: 100-continue\r\nContent-Length: 99999999\r\n\r\n",
        )
        return Hostile(kind="not_http", pieces=(self._pick(attacks),))

    def wrong_fields(self) -> Hostile:
        prompt, chat = {"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}
        wrong_of_a_prompt = (
            *({"prompt": None}, {"prompt": {}}, {"prompt": []}, {"prompt": [[1, 2]]}, {"prompt": ""}, {"model": 7}),
            *({"best_of": 9}, {"stream": "yes"}, {"stop": ["x"] * 99}, {"stop": ""}),
            *({"logprobs": 6}, {"logprobs": True}, {"logit_bias": {"7": 1}}),
            *({"tools": []}, {"__proto__": {}}, {"temperature": 3}, {"top_p": 0}, {"max_tokens": 0}, {"echo": True}),
            *({"stream_options": {"include_usage": True}}, {"messages": []}, {"x" * 500: 1}, {"seed": 2**64}),
            *({"top_logprobs": 2}, {"top_k": -1}, {"top_k": 2**40}, {"presence_penalty": 2.1}),
            # Each alone is allowed; together they would take the server's time or memory.
            *({"n": 65}, {"n": 2, "prompt": ["x"] * 33}, {"n": 64, "max_tokens": 256, "logprobs": 5}),
        )
        wrong_of_a_chat = (
            *({"top_logprobs": 5}, {"logprobs": 5}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": "yes"}),
            *({"logprobs": True, "top_logprobs": -1}, {"logprobs": True, "top_logprobs": 20, "n": 4}, {"n": 10**9}),
            *({"response_format": "json"}, {"response_format": {"type": "json_object"}}, {"response_format": {}}),
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
            *({"frequency_penalty": -2.5}, {"presence_penalty": "1"}, {"top_k": 1.5}, {"stop": [7]}, {"n": [1]}),
        )
        wrong_of_texts = (
            *({"encoding_format": "hex"}, {"dimensions": 10**9}, {"user": "x" * 600}, {"prompt": "x"}, {"model": None}),
            *({"input": wrong} for wrong in ({}, [[1]], ["x"] * 10**4, [], [""])),
        )
        all_wrong = (POSTS[0], prompt, wrong_of_a_prompt), (POSTS[1], chat, wrong_of_a_chat)
        path, good, options = self._pick((*all_wrong, (POSTS[3], {"input": "x"}, wrong_of_texts)))
        return self._post("wrong_fields", json.dumps({"model": "global", **good, **self._pick(options)}).encode(), path)

    def slow_body(self) -> Hostile:
        head = self._head("POST", POSTS[0], [b"Content-Type: application/json", b"Content-Length: 500"])
        return Hostile(kind="slow_body", pieces=(head, *[b" "] * 20), pause=0.1)

    def slow_head(self) -> Hostile:
        return Hostile(kind="slow_head", pieces=(b"GET /v1/models HTTP/1.1\r\n", *[b"X-Slow: 1\r\n"] * 400), pause=0.1)

    def _post(self, kind: str, body: bytes, path: str = "", headers: Sequence[bytes] | None = None) -> Hostile:
        headers = [b"Content-Type: application/json"] if headers is None else headers
        length = f"Content-Length: {len(body)}".encode()
        return Hostile(kind=kind, pieces=(self._head("POST", path or self._pick(POSTS), [*headers, length]) + body,))

    def _get(self, kind: str, target: str, headers: Sequence[bytes] | None = None, method: str = "GET") -> Hostile:
        return Hostile(kind=kind, pieces=(self._head(method, target, headers),))

    def _head(self, method: str, target: str, headers: Sequence[bytes] | None) -> bytes:
        """With the token, unless the headers are about tokens themselves."""
        given = list(headers or [])
        if method == "POST" or headers is None:
            given.append(f"Authorization: Bearer {self._token}".encode())
        lines = [f"{method} {target} HTTP/1.1".encode("latin-1", "replace"), b"Host: 127.0.0.1", *given]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _pick(self, options: Sequence[Any]) -> Any:
        return self._rng.choice(options)


def ask(address: tuple[str, int], hostile: Hostile, trust: ssl.SSLContext, timeout: float = 30.0) -> tuple[int, bytes]:
    """The status and the body of the server's answer; 0 if it gave none."""
    plain = socket.create_connection(address, timeout=timeout)
    with trust.wrap_socket(plain, server_hostname=address[0]) as connection:
        try:
            connection.settimeout(hostile.pause or timeout)
            for piece in hostile.pieces:
                connection.sendall(piece)
                with suppress(TimeoutError):
                    if hostile.pause and (early := connection.recv(65536)):
                        return _answer(early, connection, timeout)
            if hostile.ends:
                connection.unwrap()
                return 0, b""
        except (BrokenPipeError, ConnectionResetError, ssl.SSLError):
            pass  # It had enough; what it said may still be there.
        return _answer(b"", connection, timeout, has_body=not hostile.pieces[0].startswith(b"HEAD"))


def _answer(data: bytes, connection: socket.socket, timeout: float, has_body: bool = True) -> tuple[int, bytes]:
    connection.settimeout(timeout)
    with suppress(ConnectionResetError, TimeoutError, ssl.SSLError):
        while not _is_complete(data, has_body) and (more := connection.recv(65536)):
            data += more
    head, _, body = data.partition(b"\r\n\r\n")
    parts = head.split(b" ", 2)
    return (int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else 0), body


def _is_complete(data: bytes, has_body: bool) -> bool:
    head, end, body = data.partition(b"\r\n\r\n")
    if not has_body:
        return bool(end)
    lengths = [line.partition(b":")[2] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
    return bool(end and lengths and len(body) >= int(lengths[0]))


def ask_all(
    address: tuple[str, int], requests: Sequence[Hostile], trust: ssl.SSLContext
) -> list[tuple[Hostile, int, bytes]]:
    """All answers; four quick requests are sent at once, and all slow ones beside them."""
    quick, slow = [r for r in requests if not r.pause], [r for r in requests if r.pause]
    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(max(1, len(slow))) as other:
        shared = (other, slow), (pool, quick)
        waiting = [(each, by.submit(ask, address, each, trust)) for by, some in shared for each in some]
        return [(request, *future.result()) for request, future in waiting]


def main() -> None:
    """Attack a server that runs, and print the answers by kind and status."""
    host, port, token, authority, *number = sys.argv[1:]
    started = time.perf_counter()
    requests = Attacker(0, token).requests(int(number[0]) if number else 1000, slow=20)
    answers = ask_all((host, int(port)), requests, ssl.create_default_context(cafile=authority))
    for (kind, status), count in sorted(Counter((each.kind, status) for each, status, _ in answers).items()):
        print(f"{kind:14} {status} {count:4}")
    print(f"{len(answers)} requests in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
