"""Lateness of the stamps of two HTTP clients: simtune's own, and httpcore, if it is installed.

    python -m benchmarks.validation.http_stamps --streams 200 --tokens 100

A server in a process of its own writes the monotonic time of each message into it, 200 streams at once, one message of
each every 40 ms; clocks of processes on one machine are the same. Printed: the time from the sending of a message to
its stamp, and the client's processor time for 1,000 messages. Three runs of each client in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import numpy as np

from simtune.validation.client.http_exchange import ResponseCaps, ServerAddress, look_up, read_response

SERVE = """
import asyncio, sys, time
streams, tokens = int(sys.argv[1]), int(sys.argv[2])
HEAD = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
writers = []
async def connected(reader, writer):
    await reader.readuntil(b"\\r\\n\\r\\n")
    writer.write(HEAD)
    writers.append(writer)
    if len(writers) == streams:
        asyncio.create_task(send())
async def send():
    mine = writers[:]
    writers.clear()
    begin = time.perf_counter() + 0.2
    for token in range(tokens):
        await asyncio.sleep(max(0.0, begin + 0.04 * token - time.perf_counter()))
        for writer in mine:
            text = b"data: %r\\n\\n" % time.perf_counter()
            writer.write(b"%x\\r\\n%b\\r\\n" % (len(text), text))
    for writer in mine:
        writer.write(b"0\\r\\n\\r\\n")
        writer.close()
async def main():
    server = await asyncio.start_server(connected, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    server.close()
asyncio.run(main())
"""
Pieces = list[tuple[float, bytes]]


async def own(url: str, streams: int) -> list[Pieces]:
    """Return the stamped pieces of all streams, read by simtune's client."""
    address = await look_up(ServerAddress(url))

    async def one() -> Pieces:
        exchange = await address.open(address.server.request("GET", "/"), ResponseCaps())
        await exchange.closed
        response = read_response(exchange.pieces)
        return response.body if response is not None else []

    return list(await asyncio.gather(*(one() for _ in range(streams))))


async def httpcore_client(url: str, streams: int) -> list[Pieces]:
    """The same by httpcore, stamped when its iterator yields."""
    import httpcore

    async with httpcore.AsyncConnectionPool(max_connections=streams) as pool:

        async def one() -> Pieces:
            async with pool.stream("GET", url + "/") as response:
                return [(time.perf_counter(), piece) async for piece in response.aiter_stream()]

        return list(await asyncio.gather(*(one() for _ in range(streams))))


def run(client: Callable[[str, int], Awaitable[list[Pieces]]], url: str, streams: int, tokens: int) -> dict[str, float]:
    """Return lateness in milliseconds and CPU milliseconds for 1,000 messages."""

    async def main() -> list[Pieces]:
        return await client(url, streams)

    begun = time.process_time()
    answers = asyncio.run(main())
    cpu_s = time.process_time() - begun
    late = [
        at_s - float(line[5:])
        for pieces in answers
        for at_s, piece in pieces
        for line in piece.split(b"\n")
        if line.startswith(b"data:")
    ]
    if len(late) != streams * tokens:
        raise SystemExit(f"{len(late)} messages came, not {streams * tokens}")
    p50, p99 = 1e3 * np.percentile(late, [50, 99])
    return {"p50_ms": float(p50), "p99_ms": float(p99), "cpu_ms_for_1000": 1e6 * cpu_s / len(late)}


def main() -> None:
    """Run the clients in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=100)
    args = parser.parse_args()
    clients = {"simtune": own, "httpcore": httpcore_client}
    try:
        import httpcore  # noqa: F401
    except ImportError:
        del clients["httpcore"]
    command = [sys.executable, "-c", SERVE, str(args.streams), str(args.tokens)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        for _ in range(3):
            for name, client in clients.items():
                print(json.dumps({"client": name} | run(client, url, args.streams, args.tokens)), flush=True)
        process.stdin.close()


if __name__ == "__main__":
    main()
