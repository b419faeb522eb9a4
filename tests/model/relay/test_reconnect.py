"""After a cut or a restart of relay or dialer, calls continue or fail with an error that SDKs retry."""

import asyncio
import hashlib
import io
import random

import aiohttp
import pytest
from aiohttp import web

from builders import eventually
from rollout_backend.model.relay.dialer import RelayRefused


async def test_call_made_during_a_cut_waits(line, http, get):
    laid = await line()
    await laid.cut()

    async def noticed() -> bool:
        return not await laid.relay.dialled()

    await eventually(noticed)
    call = asyncio.create_task(get(f"{laid.url}/v1/x"))
    await eventually(lambda: laid.relay.has_calls(1))
    assert laid.upstream.asked == []
    laid.wire.down = False
    assert (await call).status == 200


async def test_streams_in_both_directions_survive_many_cuts(line, http):
    """Bodies of megabytes over many cuts: each byte arrives once and in order."""
    laid = await line()
    draw = random.Random(7)
    sent = [draw.randbytes(3_000_000) for _ in range(6)]
    laid.wire.cut_every = 4_000_000  # more than the window, which is resent after each cut

    async def mirror(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        async for part in request.content.iter_chunked(50_000):
            await answer.write(part)
        return answer

    laid.upstream.handle = mirror

    async def one(body: bytes) -> str:
        async with http.post(f"{laid.url}/v1/x", data=io.BytesIO(body)) as answer:
            return hashlib.sha256(await answer.read()).hexdigest()

    got = await asyncio.gather(*(one(body) for body in sent))
    assert got == [hashlib.sha256(body).hexdigest() for body in sent]
    assert laid.wire.connections >= 8
    assert len(laid.upstream.asked) == len(sent)
    await eventually(lambda: not laid.dialer.channels)
    assert await laid.relay.has_calls(0)


async def test_silent_connection_is_closed(line, host_relay, get):
    laid = await line(await host_relay(heartbeat_s=0.4), heartbeat_s=0.4)
    go = laid.upstream.hold()
    call = await laid.held_call(get)
    laid.wire.hold()
    await eventually(lambda: laid.wire.connections >= 2)
    laid.wire.release()
    go.set()
    assert await (await call).text() == "at last"
    assert len(laid.upstream.asked) == 1


async def test_dialer_reconnects_before_the_relay_notices(line, host_relay, get):
    laid = await line(
        await host_relay(heartbeat_s=3600)
    )  # it would notice with the next ping on the first connection
    go = laid.upstream.hold()
    call = await laid.held_call(get)
    laid.wire.half = True
    await laid.wire.cut()
    laid.wire.half = False
    await eventually(lambda: laid.wire.connections == 2)
    go.set()
    assert await (await call).text() == "at last"
    assert len(laid.upstream.asked) == 1
    assert not laid.dialling.done()


async def test_calls_end_if_the_dialer_does_not_reconnect(line, host_relay, http, get):
    laid = await line(await host_relay(reconnect_s=0.5, wait_s=0.5), reconnect_s=0.5)
    laid.upstream.hold()
    plain = asyncio.create_task(get(f"{laid.url}/v1/x"))
    stream = await http.get(f"{laid.url}/v1/stream")
    assert await stream.content.readline() == b"data: one\n"
    await eventually(lambda: len(laid.upstream.asked) == 2)
    await laid.cut()
    answer = await plain
    assert (answer.status, answer.headers["Retry-After"]) == (504, "1")
    with pytest.raises(aiohttp.ClientPayloadError):
        await stream.read()
    await eventually(lambda: laid.upstream.left == 2)  # at the gateway too
    laid.wire.down = False
    laid.upstream.handle = None
    await eventually(laid.relay.dialled)
    assert (await get(f"{laid.url}/v1/x")).status == 200


async def test_stopping_relay_answers_503(line, start_relay, get):
    laid = await line(await start_relay("--wait-s", 1))
    laid.upstream.hold()
    call = await laid.held_call(get)
    laid.relay.process._process.terminate()
    answer = await call
    assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    assert await laid.relay.process.wait() == 0


async def test_restarted_trainer_takes_over_the_relay(line, dial, http, upstream, get):
    laid = await line()
    upstream.hold()
    call = await laid.held_call(get)
    second, _ = dial(laid.relay.url.replace("http", "ws"), upstream.url)
    answer = await call  # a call of the first dialer
    assert (answer.status, answer.headers["Retry-After"]) == (503, "2")
    upstream.handle = None
    assert (await get(f"{laid.url}/v1/x")).status == 200
    with pytest.raises(RelayRefused, match="has taken over"):
        await laid.dialling
    assert await laid.relay.dialled(second._settings.dialer_id)


async def test_dialer_replaced_during_a_cut_is_refused(line, dial, upstream):
    laid = await line()
    await laid.cut()
    second, task = dial(laid.relay.url.replace("http", "ws"), upstream.url)
    await eventually(lambda: laid.relay.dialled(second._settings.dialer_id))
    laid.wire.down = False
    with pytest.raises(RelayRefused, match="has taken over"):
        await laid.dialling
    assert not task.done()
    assert await laid.relay.dialled(second._settings.dialer_id)
