"""How close to ideal is a judge over a slow endpoint? No part of the tests: `make bench-endpoint`.

2,000 different thoughts are judged against a server process that answers each request after 200 ms, 64 at once. The
ideal is ceil(2000 / 64) x 0.2 s = 6.4 s. A second run, in a new process, has to make no request at all.

Beside it stands a floor, measured before and after: the same bodies sent to the same server over 64 bare sockets. On a
machine with other work it says how much of the difference is the machine's, as does the processor time per request.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from awpo.config import EndpointConfig, JudgeConfig
from awpo.judge_endpoint import EndpointJudge
from awpo.judge_prompts import RESPONSE_FORMAT, judge_messages
from awpo.judgement import Judgement
from awpo.types import Completion, Instance, Message, Tool, ToolCall

HERE = Path(__file__).resolve()
GRADES = json.dumps({"reason": "so", "coherence": 8, "correctness": 8, "appropriateness": 8})


def fault_server() -> Any:
    specification = importlib.util.spec_from_file_location("fault_server", HERE.parents[1] / "fault_server.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["fault_server"] = module
    specification.loader.exec_module(module)
    return module.FaultServer()


def judgements(count: int) -> list[Judgement]:
    call = ToolCall("set_alarm", {"time": "7:30"})
    schema = {"type": "object", "properties": {"time": {"type": "string"}}}
    instance = Instance(
        "s",
        "d",
        0,
        1,
        "train",
        (Tool("set_alarm", "Set an alarm", schema),),
        (Message("user", "Wake me at 7:30"),),
        Message("assistant", None, (call,)),
        "set_alarm fits: set an alarm. time is 7:30.",
    )
    return [Judgement(instance, Completion(f"Thought number {number}.", (call,), "")) for number in range(count)]


async def bare(url: str, count: int, concurrency: int) -> None:
    """The same requests over sockets, with nothing between."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    numbers = iter(judgements(count))

    async def work() -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        for item in numbers:
            messages = judge_messages(item.instance, item.completion, with_reference=True)
            body = json.dumps({"model": "m", "messages": messages, "response_format": RESPONSE_FORMAT}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            length = int(answer.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            await reader.readexactly(length)
        writer.close()

    await asyncio.gather(*(work() for _ in range(concurrency)))


def floor_once(url: str, count: int, concurrency: int) -> dict[str, float]:
    start, processor = time.perf_counter(), time.process_time()
    asyncio.run(bare(url, count, concurrency))
    return {"seconds": time.perf_counter() - start, "processor": time.process_time() - processor}


def judge_once(url: str, cache: str, count: int, concurrency: int) -> dict[str, float]:
    endpoint = EndpointConfig(base_url=url, model="m", concurrency=concurrency, timeout_seconds=60, cache=cache)
    judge = EndpointJudge(JudgeConfig(kind="endpoint", endpoint=endpoint, deadline_seconds=3600))
    items = judgements(count)
    start, processor = time.perf_counter(), time.process_time()
    scores = asyncio.run(judge.score(items))
    seconds, processor = time.perf_counter() - start, time.process_time() - processor
    assert all(abs(score - 0.8) < 1e-9 for score in scores)
    return {"seconds": seconds, "processor": processor, "requests": judge.metrics()["requests"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--latency", type=float, default=0.2)
    parser.add_argument("--floor", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--once", nargs=2, metavar=("URL", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(judge_once(*arguments.once, arguments.count, arguments.concurrency)))
        return
    if arguments.floor:
        print(json.dumps(floor_once(arguments.floor, arguments.count, arguments.concurrency)))
        return
    ideal = math.ceil(arguments.count / arguments.concurrency) * arguments.latency
    with fault_server() as server, tempfile.TemporaryDirectory() as folder:
        server.script(default={"do": "answer", "text": GRADES, "delay": arguments.latency})
        sizes = ["--count", str(arguments.count), "--concurrency", str(arguments.concurrency)]

        def process(*what: str) -> dict[str, float]:
            command = [sys.executable, str(HERE), *what, *sizes]
            found: dict[str, float] = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            return found

        before = process("--floor", server.url)
        first = process("--once", server.url, f"{folder}/cache")
        after = process("--floor", server.url)
        served = len(server.log()) - 2 * arguments.count
        second = process("--once", server.url, f"{folder}/cache")
        served_twice = len(server.log()) - 2 * arguments.count - served
    floor = (before["seconds"] + after["seconds"]) / 2
    ratio = first["seconds"] / ideal
    print(f"{arguments.count} judgements, {arguments.concurrency} at once, {arguments.latency * 1000:.0f} ms each")
    print(f"ideal      {ideal:7.2f} s")
    print(f"floor      {floor:7.2f} s   (before {before['seconds']:.2f} s, after {after['seconds']:.2f} s)")
    print(
        f"first run  {first['seconds']:7.2f} s   {ratio:.2f} times the ideal (goal: at most 1.10), {first['seconds'] / floor:.2f} times the floor"
    )
    print(
        f"           {first['processor']:7.2f} s of the processor, {first['processor'] / arguments.count * 1e6:.0f} us each"
    )
    print(
        f"second run {second['seconds']:7.2f} s   {second['requests']:.0f} requests (goal: 0); {served} served in the first"
    )
    if second["requests"] or served_twice or served != arguments.count:
        sys.exit("failed: a judgement was paid for twice")


if __name__ == "__main__":
    main()
