"""New weights for engines that a run started, with engines that fail to load them in every way that was seen."""

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from aiohttp import web

from adapters import save_model
from builders import all_serve, eventually, generate
from builders import served as serve_http
from rollout_backend.base import disk
from rollout_backend.errors import ConfigError, ServingError, StartupError, WeightsMismatch, WeightUpdateFailed
from rollout_backend.model.serving.engine_routing import EngineRouting, RoutedEngine
from rollout_backend.model.serving.model_serving import ModelServing
from rollout_backend.model.serving.router import EngineDirectory, Router
from rollout_backend.model.serving.weights import ModelFolder, Weights, WeightStore, load_weights

SHAPES = {"embed.weight": (8, 4), "norm.weight": (4,)}
save = partial(save_model, shapes=SHAPES)


@pytest.fixture
def config(make_config, model_folder, tmp_path):
    save(model_folder)
    return make_config(serving={"servers": 2, "max_restarts": 2}, output_dir=tmp_path)


async def sampled(serving, key, tokens=1):
    """Return the version and the weights that sampled a reply of the router, and how it ended."""
    _, answer = await generate(serving.engines.router_url, key, tokens)
    return answer["meta_info"]["weight_version"], answer["weights"], answer["meta_info"]["finish_reason"]["type"]


async def served(serving):
    return {(await sampled(serving, f"session-{i}"))[:2] for i in range(12)}


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("lies", "answered 200 to new weights"),
        pytest.param("refuses", "answered 400 to new weights", marks=pytest.mark.slow),
        pytest.param("dies", "did not load new weights: ", marks=pytest.mark.slow),
        pytest.param("mislabels", "reports version '0'", marks=pytest.mark.slow),
    ],
)
async def test_an_engine_that_fails_or_restarts_serves_only_the_new_weights(serve, config, tmp_path, mode, why):
    new = save(tmp_path / "new", 1.0)
    async with serve("healthy", mode) as (serving, events, engines):
        assert await served(serving) == {("0", "original")}
        in_flight = [asyncio.create_task(sampled(serving, f"session-{i}", tokens=9999)) for i in range(8)]
        await eventually(lambda: (tmp_path / "engines.log").read_text().count("generates 9999") == 8)
        update = await serving.update_weights(new)
        assert update.version == 1 == serving.weight_version
        [(failed, reason)] = update.failed.items()
        assert why in reason
        assert await served(serving) == {("1", str(new))}  # the other engine alone
        assert set(await asyncio.gather(*in_flight)) == {("0", "original", "abort")}
        await eventually(lambda: all_serve(serving, restarts=1))
        assert [event.server for event in events if event.kind == "died"] == [failed]
        assert await served(serving) == {("1", str(new))}
        # Which of the two has the mode is decided by which starts first.
        [other] = [engine for engine in engines[:2] if engine._name != failed]
        os.kill(other.pid, signal.SIGKILL)
        await eventually(lambda: all_serve(serving, restarts=2))
        assert await served(serving) == {("1", str(new))}
    assert WeightStore(config).current.version == 1


@pytest.mark.parametrize("text", ["[]", "\xff{"])
async def test_an_engine_whose_answers_are_no_objects_has_not_loaded_the_weights(config, tmp_path, text):
    async def answer(request):
        loaded = request.method == "POST"
        return web.Response(text='{"success": true}' if loaded else text, content_type="application/json")

    async with serve_http(answer) as url:
        with pytest.raises(ServingError, match="reports version None of its weights after loading 1"):
            await load_weights(url, Weights.of(1, save(tmp_path / "new")), config.serving)


@pytest.mark.slow
async def test_weights_that_no_engine_loads_leave_the_previous_ones(serve, tmp_path):
    old, bad, new = save(tmp_path / "old", 1.0), save(tmp_path / "bad", 2.0), save(tmp_path / "new", 3.0)
    async with serve() as (serving, _, _):
        await serving.update_weights(old)
        with pytest.raises(WeightUpdateFailed, match=r"no engine loaded version 2 .* restart with version 1"):
            await serving.update_weights(bad)
        await eventually(lambda: all_serve(serving, restarts=2))
        assert await served(serving) == {("1", str(old))}
        assert (await serving.update_weights(new)).version == 2
        assert await served(serving) == {("2", str(new))}


async def test_a_disk_that_fails_is_a_failure_of_the_update(serve, config, tmp_path, monkeypatch):
    def fail(path):
        raise OSError("Stale file handle")

    (config.run_dir / "weights").mkdir(parents=True)
    new = save(tmp_path / "new", 1.0)
    async with serve() as (serving, _, _):
        monkeypatch.setattr(Path, "iterdir", fail)
        with pytest.raises(WeightUpdateFailed, match="Stale file handle"):
            await serving.update_weights(new)


@pytest.mark.slow
async def test_a_restarted_trainer_serves_the_newest_weights_and_counts_on(serve, tmp_path):
    new = save(tmp_path / "new", 1.0)
    async with serve() as (serving, _, _):
        await serving.update_weights(new)
    async with serve() as (serving, _, _):
        assert serving.weight_version == 1
        assert await served(serving) == {("1", str(new))}
        assert (await serving.update_weights(save(tmp_path / "newer", 2.0))).version == 2


@pytest.mark.slow
async def test_an_interrupted_update_restarts_the_engines_with_the_previous_weights(serve, tmp_path):
    async with serve("hangs", "hangs") as (serving, _, _):
        updating = asyncio.create_task(serving.update_weights(save(tmp_path / "new", 1.0)))
        await eventually(lambda: serving.engines.snapshot()[1].paused)
        updating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await updating
        await eventually(lambda: all_serve(serving, restarts=2))
        assert await served(serving) == {("0", "original")}


async def test_weights_that_do_not_fit_reach_no_engine(config, tmp_path, model_folder):
    serving = ModelServing(config, tmp_path)  # no engine is started
    with pytest.raises(WeightsMismatch, match=r"norm.weight is \(5,\) and should be \(4,\)"):
        await serving.update_weights(save(tmp_path / "other", shapes={**SHAPES, "norm.weight": (5,)}))
    with pytest.raises(ConfigError, match=r"is not a model folder.* for config\.json"):
        await serving.update_weights(tmp_path / "missing")
    cut = save(tmp_path / "cut")
    (cut / "model.safetensors").write_bytes((cut / "model.safetensors").read_bytes()[:50])
    with pytest.raises(ConfigError, match="is it still being written"):
        await serving.update_weights(cut)
    (cut / "config.json").write_text('{"model_type"')
    with pytest.raises(ConfigError, match=r"config\.json cannot be read .* is it still being written"):
        await serving.update_weights(cut)
    assert serving.weight_version == 0


async def test_engines_of_others_are_refused(make_config, tmp_path):
    config = make_config(serving={"kind": "external", "urls": ("http://127.0.0.1:1",)})
    with pytest.raises(ConfigError, match=r"needs serving\.kind=process, ray or tinker, and it is external"):
        await ModelServing(config, tmp_path).update_weights(tmp_path)


async def test_a_deleted_folder_is_a_failure_of_the_engine(config, tmp_path):
    weights = WeightStore(config).prepare(save(tmp_path / "checkpoint"))
    shutil.rmtree(weights.folder)
    with pytest.raises(ServingError, match="has changed or is gone"):
        await load_weights("http://127.0.0.1:1", weights, config.serving)


async def test_an_engine_that_does_not_answer_is_a_failure(config, tmp_path):
    weights = WeightStore(config).prepare(save(tmp_path / "checkpoint"))
    serving = config.serving.model_copy(update={"startup_timeout_s": 0.1})
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServingError, match=r"did not load new weights within 0\.1 s"):
            await load_weights(url, weights, serving)


async def test_the_newest_weights_must_still_be_there(config, tmp_path):
    folder = save(tmp_path / "checkpoint", 1.0)
    store = WeightStore(config)
    await store.commit(weights := store.prepare(folder))
    again = WeightStore(config)
    assert again.current == weights
    assert again.prepare(folder).version == 2
    save(folder, 2.0, shapes={**SHAPES, "more.weight": (1,)})
    with pytest.raises(ServingError, match="each checkpoint to its own folder"):
        weights.check_unchanged()
    with pytest.raises(ConfigError, match="has changed or is gone since it became version 1"):
        WeightStore(config)
    folder.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match="checkpoint, which is gone: restore the folder"):
        WeightStore(config)
    (config.run_dir / "weights.json").write_text("{}")
    with pytest.raises(ConfigError, match="unknown which weights this run served last"):
        WeightStore(config)


async def test_weights_in_memory_end_with_the_trainer_and_their_version_is_not_used_again(config, tmp_path, caplog):
    store = WeightStore(config)
    await store.commit(Weights(1, None))
    restarted = WeightStore(config)
    assert restarted.current is None
    assert "version 1 of the weights was only in the memory of an earlier trainer" in caplog.text
    assert restarted.prepare(save(tmp_path / "checkpoint")).version == 2


@pytest.mark.parametrize("engines", [{"kind": "external", "urls": ["http://127.0.0.1:1"]}, {"engine": "vllm"}])
def test_a_group_with_engines_that_cannot_join_it_is_refused(make_config, engines):
    with pytest.raises(ConfigError, match="weight_transfer=gloo needs engine=sglang and servers that the run starts"):
        make_config(serving={"weight_transfer": "gloo", **engines})


def test_a_folder_without_safetensors_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json"):
        ModelFolder(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="save_pretrained"):
        ModelFolder(tmp_path)


async def test_a_disk_that_hangs_is_a_failure_of_the_engine(config, tmp_path, monkeypatch):
    weights, free = Weights.of(1, save(tmp_path / "new")), threading.Event()
    monkeypatch.setattr(disk, "DISK_S", 0.1)
    monkeypatch.setattr(Path, "glob", lambda *_: free.wait(60))
    with pytest.raises(ServingError, match="cannot be read, because its disk hangs"):
        await load_weights("http://127.0.0.1:9", weights, config.serving)
    free.set()


def test_an_interrupted_update_does_not_disturb_the_next(config, monkeypatch):
    """The thread of the first one still writes its weights when the second begins."""
    store, began, go = WeightStore(config), threading.Event(), threading.Event()

    def write(self, tensors, into, dtype):
        [name] = tensors
        if name == "first":
            began.set()
            go.wait(60)
        else:
            go.set()
            first.join()
        (into / "model.safetensors").write_text(name)

    def interrupted():
        with contextlib.suppress(ServingError):
            store.prepare({"first": None})

    monkeypatch.setattr(ModelFolder, "write", write)
    first = threading.Thread(target=interrupted)
    first.start()
    began.wait(60)
    weights = store.prepare({"second": None})
    assert (weights.folder / "model.safetensors").read_text() == "second"
    weights.check_unchanged()
    store.prune()
    assert not weights.folder.exists()


async def test_engines_that_fail_together_are_removed_together(config, tmp_path):
    removed, both = set(), asyncio.Event()

    class SlowRouter(EngineDirectory):
        async def remove(self, url):
            removed.add(url)
            if len(removed) == 2:
                both.set()
            await both.wait()

    async def commit():
        raise AssertionError

    routing = EngineRouting(SlowRouter(config.router), config.serving)
    routing.engines += [
        RoutedEngine(f"engine-{i}", SimpleNamespace(url=f"http://127.0.0.1:{i + 1}")) for i in range(2)
    ]
    engines = [*routing.engines]
    async with asyncio.timeout(60):
        failed = await routing.update_weights(Weights.of(1, save(tmp_path / "new")), commit)
        assert {engine.name for engine in engines} == failed.keys()
        for engine in engines:
            assert "version 1 of the weights" in await engine.wait_unfit()


async def test_a_router_that_hangs_delays_a_removal_once(config, tmp_path):
    class HungRouter(Router):
        async def workers(self):
            await asyncio.Event().wait()

    with pytest.raises(StartupError, match=r"did not remove the engine http://a within 0\.1 s"):
        await HungRouter(config.router, tmp_path / "router.log").remove("http://a", 0.1)
