"""How close to ideal is a judge over a slow endpoint? No part of the tests: `make bench-endpoint`.

2,000 different thoughts are judged against a server process that answers each request after 200 ms, 64 at once. The
ideal is the same requests on the same machine without anything of ours: ceil(2000 / 64) x 0.2 s = 6.4 s. A second run,
in a new process, has to make no request at all. What the client itself costs per request is printed beside it, since
on a machine with other work that, and not waiting, is what the difference consists of.
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
from awpo.judge import EndpointJudge, Judgement
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
    parser.add_argument("--once", nargs=2, metavar=("URL", "CACHE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.once:
        print(json.dumps(judge_once(*arguments.once, arguments.count, arguments.concurrency)))
        return
    ideal = math.ceil(arguments.count / arguments.concurrency) * arguments.latency
    with fault_server() as server, tempfile.TemporaryDirectory() as folder:
        server.script(default={"do": "answer", "text": GRADES, "delay": arguments.latency})
        command = [sys.executable, str(HERE), "--once", server.url, f"{folder}/cache"]
        command += ["--count", str(arguments.count), "--concurrency", str(arguments.concurrency)]
        first, second = (
            json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(2)
        )
        served = len(server.log())
    ratio = first["seconds"] / ideal
    print(f"{arguments.count} judgements, {arguments.concurrency} at once, {arguments.latency * 1000:.0f} ms each")
    print(f"ideal      {ideal:7.2f} s")
    print(f"first run  {first['seconds']:7.2f} s   {ratio:.2f} times the ideal (goal: at most 1.10)")
    print(
        f"           {first['processor']:7.2f} s of the processor, {first['processor'] / arguments.count * 1e6:.0f} us each"
    )
    print(
        f"second run {second['seconds']:7.2f} s   {second['requests']:.0f} requests (goal: 0); {served} served in all"
    )
    if second["requests"] or served != arguments.count:
        sys.exit("failed: a judgement was paid for twice")


if __name__ == "__main__":
    main()
