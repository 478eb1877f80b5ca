"""The example behind FastAPI: uvicorn on a port of this machine, asked by httpx, many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import io
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import as_bytes

from lazy_backend import config

pytest.importorskip("fastapi", reason="the example needs fastapi")
uvicorn = pytest.importorskip("uvicorn", reason="the example needs uvicorn")
httpx = pytest.importorskip("httpx", reason="requests are made by httpx")

EXAMPLES = str(Path(__file__).resolve().parent.parent / "examples")
ROWS, WIDTH = 8, 64


@contextlib.contextmanager
def served_example(backend: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, str]]:
    """The example's module, imported anew, and the address at which it answers."""
    config.compile, config.backend = "foreground", backend
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.delitem(sys.modules, "serve_web", raising=False)
    example = importlib.import_module("serve_web")
    server = uvicorn.Server(uvicorn.Config(example.app, host="127.0.0.1", port=0, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started or not thread.is_alive())
        port = server.servers[0].sockets[0].getsockname()[1]
        yield example, f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()
        monkeypatch.delitem(sys.modules, "serve_web")


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def file_of(state: dict[str, torch.Tensor]) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def test_each_of_many_answers_is_that_of_one_version(monkeypatch: pytest.MonkeyPatch) -> None:
    callers, requests, swaps = 8, 40, 20
    with served_example("eager", monkeypatch) as (example, address):
        x = torch.randn(ROWS, WIDTH)
        state = example.network.state_dict()
        states = [{name: one * (1 + 0.1 * version) for name, one in state.items()} for version in range(swaps)]
        answers: dict[bytes, int] = {}
        for version, one in enumerate(states):
            example.served.swap_weights(one)
            answers[as_bytes(example.served(x))] = version
        assert len(answers) == swaps
        example.served.swap_weights(states[0])

        async def ask(client: Any) -> list[int]:
            found = []
            for _ in range(requests):
                reply = await client.post("/answer", json=x.tolist())
                if reply.status_code == 503:
                    continue
                assert reply.status_code == 200, reply.text
                found.append(answers.get(as_bytes(torch.tensor(reply.json())), -1))
            return found

        async def swap(client: Any) -> None:
            for one in states[1:]:
                assert (await client.put("/weights", content=file_of(one))).status_code == 200

        async def all_of_them() -> list[list[int]]:
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:
                *found, _ = await asyncio.gather(*(ask(client) for _ in range(callers)), swap(client))
                return found

        for versions in asyncio.run(all_of_them()):
            assert versions == sorted(versions)
            assert versions[0] >= 0
        assert answers[as_bytes(example.served(x))] == swaps - 1


def test_one_request_more_than_allowed_gets_503_and_the_others_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    gate, waiting = threading.Event(), []

    def held(module: torch.fx.GraphModule, examples: Any) -> Callable[..., Any]:
        def run(*inputs: Any) -> Any:
            waiting.append(None)
            assert gate.wait(60)
            return module(*inputs)

        return run

    gate.set()
    with served_example(held, monkeypatch) as (example, address):
        x = torch.randn(ROWS, WIDTH)
        expected = [example.served(x) for _ in range(2)][1]  # the first one may be another run
        waiting.clear()
        gate.clear()

        async def ask() -> tuple[Any, str, list[Any]]:
            async with httpx.AsyncClient(base_url=address, timeout=60) as client:
                try:
                    under_way = [asyncio.create_task(client.post("/answer", json=x.tolist())) for _ in range(4)]
                    await asyncio.to_thread(until, lambda: len(waiting) == 4)
                    refused = await client.post("/answer", json=x.tolist())
                    text = (await client.get("/metrics")).text  # the event loop is free
                finally:
                    gate.set()
                return refused, text, await asyncio.gather(*under_way)

        refused, text, replies = asyncio.run(ask())
    assert refused.status_code == 503
    assert refused.headers["Retry-After"] == "1"
    assert "4 requests to Sequential are under way" in refused.json()["detail"]
    assert "lazy_backend_served_refused_total 1\n" in text
    for reply in replies:
        assert reply.status_code == 200
        torch.testing.assert_close(torch.tensor(reply.json()), expected)


def test_what_does_not_fit_is_the_callers_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    with served_example("eager", monkeypatch) as (example, address):
        state = example.network.state_dict()
        one_name = dict(list(state.items())[:1])
        with httpx.Client(base_url=address, timeout=60) as client:
            for rows, text in (([[1.0] * 9], "shapes"), ([[1.0, 2.0], [1.0]], "length"), ([], "dimensions")):
                reply = client.post("/answer", json=rows)
                assert reply.status_code == 400
                assert text in reply.json()["detail"]
            assert client.post("/answer", json="x").status_code == 422
            for content in (b"", b"no weights", file_of(one_name), file_of({**state, "0.weight": torch.ones(3)})):
                assert client.put("/weights", content=content).status_code == 400
            x = torch.randn(3, WIDTH)
            answer = torch.tensor(client.post("/answer", json=x.tolist()).json())
        torch.testing.assert_close(answer, example.network(x).detach())


@pytest.mark.scenario
def test_a_server_that_is_interrupted_answers_what_it_has_begun_and_ends() -> None:
    command = [sys.executable, "-m", "uvicorn", "--app-dir", EXAMPLES, "serve_web:app", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        assert server.stderr is not None
        lines: list[str] = []
        for line in server.stderr:
            lines.append(line)
            if "running on" in line:
                break
        address = lines[-1].split("running on ")[1].split()[0]
        failed: list[Any] = []
        num_answers = 0

        def ask() -> None:
            nonlocal num_answers
            with httpx.Client(base_url=address, timeout=60) as client, contextlib.suppress(httpx.TransportError):
                while True:
                    reply = client.post("/answer", json=[[1.0] * WIDTH] * ROWS)
                    if reply.status_code not in (200, 503):
                        failed.append(reply.text)
                    num_answers += 1

        callers = [threading.Thread(target=ask) for _ in range(4)]
        for caller in callers:
            caller.start()
        until(lambda: num_answers > 100)
        server.send_signal(signal.SIGINT)
        lines += server.stderr.readlines()
        for caller in callers:
            caller.join()
    assert failed == []
    assert "Traceback" not in "".join(lines)
    assert server.returncode in (0, -signal.SIGINT)
