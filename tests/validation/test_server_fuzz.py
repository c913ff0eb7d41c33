"""Answers of a server changed at random: each fails one request by name, or none, and no other."""

from __future__ import annotations

import json
import socket
import threading
from random import Random

import pytest

from simtune.validation.client.load_client import Patience
from tests.fuzz.mutations import mutated_tree
from tests.validation.bad_server import CHUNKED, DONE, HEAD, Script, event, serving
from tests.validation.test_bad_servers import one_by_one, peak_mib, sent

FEW, MANY = 20, 5_000
REQUESTS = 4
BATCH = 20
QUICK = Patience(silence_s=2.0, request_s=5.0, metrics_every_s=0.1)


def _answer(random: Random) -> bytes:
    """An answer of four tokens, in pieces with their lengths or as a whole."""
    events = [event(n + 1) for n in range(4)] + [DONE]
    if random.random() < 0.5:
        return HEAD + b"".join(events)
    return CHUNKED + b"".join(b"%x\r\n%s\r\n" % (len(text), text) for text in events) + b"0\r\n\r\n"


def _of_message(answer: bytes, random: Random) -> bytes:
    """One message with one to three changes in its structure."""
    lines = answer.split(b"\n")
    at = random.choice([n for n, line in enumerate(lines) if line.startswith(b"data: {")])
    tree = json.loads(lines[at][6:])
    try:
        lines[at] = b"data: " + json.dumps(mutated_tree(tree, random)).encode()
    except (RecursionError, ValueError):
        lines[at] = b"data: " + b"[" * 100_000
    return b"\n".join(lines)


def _of_lines(answer: bytes, random: Random) -> bytes:
    """Lines, of the head too, lost, doubled, in another order or very long."""
    lines = answer.split(b"\n")
    at, to = random.randrange(len(lines)), random.randrange(len(lines))
    kind = random.random()
    if kind < 0.3:
        del lines[at]
    elif kind < 0.6:
        lines.insert(to, lines[at])
    elif kind < 0.8:
        lines[at], lines[to] = lines[to], lines[at]
    else:
        lines[at] += random.choice((b"\r", b": x", b"9" * 4000, b"x" * 70_000, b"\0", b"\xff\xfe"))
    return b"\n".join(lines)


def _of_bytes(answer: bytes, random: Random) -> bytes:
    """Bytes changed, lost or inserted, or the end lost."""
    changed = bytearray(answer)
    for _ in range(random.choice((1, 1, 3, 20))):
        at = random.randrange(len(changed))
        kind = random.random()
        if kind < 0.4:
            changed[at] = random.randrange(256)
        elif kind < 0.6:
            del changed[at : at + random.choice((1, 2, 40))]
        elif kind < 0.8:
            changed[at:at] = bytes(random.randrange(256) for _ in range(random.choice((1, 2, 40))))
        else:
            del changed[at:]
        if not changed:
            break
    return bytes(changed)


def _status(answer: bytes, random: Random) -> bytes:
    line = random.choice((b"HTTP/1.1 500 No", b"HTTP/1.1 302 Found", b"HTTP/1.1 204 None", b"HTTP/9 x", b"", b"200 OK"))
    return line + answer[answer.index(b"\r\n") :]


def misbehaving(number: int) -> Script:
    """Return the script of case `number`: bytes cut at random places; at times the connection stays open."""
    random = Random(number)
    answer = random.choice((_of_message, _of_message, _of_lines, _of_bytes, _status))(_answer(random), random)
    cuts = sorted(random.randrange(len(answer) + 1) for _ in range(random.choice((0, 0, 1, 5))))
    pieces = [answer[a:b] for a, b in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    stays = random.random() < 0.1

    def script(connection: socket.socket, over: threading.Event) -> None:
        for piece in pieces:
            connection.sendall(piece)
        if stays:
            over.wait(0.1)

    return script


def judged(number: int) -> str | None:
    """Return what was wrong with how the client took case `number`; None for nothing."""
    with serving(misbehaving(number)) as bad:
        requests = sent(bad.url, one_by_one(REQUESTS), QUICK).requests
    if len(requests) != REQUESTS:
        return f"{len(requests)} of {REQUESTS} requests"
    good = [request.error for request in requests[1::2]]
    if good != [None] * len(good):
        return f"a good answer failed: {good}"
    errors = {request.error for request in requests[::2]} - {None}
    if any(not error or "Traceback" in error or len(error) > 500 for error in errors):
        return f"no message: {errors}"
    if any(request.error is None and (request.output_tokens or 0) != 4 for request in requests):
        return "a short answer counts as whole"
    return None


@pytest.mark.parametrize("first", range(0, FEW, BATCH))
def test_a_changed_answer_fails_one_request(first: int) -> None:
    before = peak_mib()
    wrong = {number: words for number in range(first, first + BATCH) if (words := judged(number)) is not None}
    assert wrong == {}
    assert peak_mib() - before < 256


@pytest.mark.slow
def test_many_changed_answers_fail_one_request_each() -> None:
    before = peak_mib()
    wrong = {number: words for number in range(FEW, MANY) if (words := judged(number)) is not None}
    assert wrong == {}
    assert peak_mib() - before < 256


def test_cases_differ_and_some_are_refused() -> None:
    """The judge sees a client that takes anything."""
    errors = []
    for number in range(12):
        with serving(misbehaving(number)) as bad:
            errors.append(sent(bad.url, one_by_one(1), QUICK).requests[0].error)
    assert len(set(errors)) > 2
