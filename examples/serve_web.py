"""A served network behind FastAPI: uvicorn --app-dir examples serve_web:app"""

import asyncio
import io

import torch
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import PlainTextResponse

import lazy_backend

network = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 10)).eval()
served = lazy_backend.serve(network, torch.randn(8, 64), max_requests=4)
app = FastAPI()


@app.post("/answer")
async def answer(rows: list[list[float]]) -> list[list[float]]:
    try:
        return (await served.call(torch.tensor(rows))).tolist()
    except lazy_backend.TooManyRequestsError as error:
        raise HTTPException(503, str(error), {"Retry-After": "1"}) from None
    except ValueError as error:  # an InputError, or rows of several lengths
        raise HTTPException(400, str(error)) from None


@app.put("/weights")
async def swap(request: Request) -> None:
    file = io.BytesIO(await request.body())
    try:
        await asyncio.to_thread(lambda: served.swap_weights(torch.load(file, weights_only=True)))
    except Exception as error:  # torch.load raises many kinds for what is no file of weights
        raise HTTPException(400, f"{type(error).__name__}: {error}") from None


@app.get("/metrics")
async def metrics() -> PlainTextResponse:
    return PlainTextResponse(lazy_backend.metrics.to_prometheus())
