"""LoRA adapters on engines that a run started: their folders, their versions, and engines that do not load them."""

import asyncio
import json
import os
import shutil
import signal

import pytest

from adapters import save_adapter, save_model
from builders import all_serve, eventually, generate
from rollout_backend.config import ServingConfig
from rollout_backend.errors import ConfigError, ServingError, WeightsMismatch
from rollout_backend.model.serving.adapters import AdapterStore
from rollout_backend.model.serving.model_serving import ModelServing

SHAPES = {"model.layers.0.self_attn.q_proj.weight": (8, 4), "model.layers.0.mlp.up_proj.weight": (6, 4)}


@pytest.fixture
def config(make_config, model_folder, tmp_path):
    save_model(model_folder, shapes=SHAPES)
    serving = {"servers": 2, "max_restarts": 2, "lora_rank": 4, "max_adapters": 2}
    return make_config(serving=serving, output_dir=tmp_path)


@pytest.fixture
def save(model_folder, config, tmp_path):
    """Write an adapter of the model into a folder of this name."""
    return lambda name, **more: save_adapter(tmp_path / name, model_folder, **{"modules": ("q_proj",), **more})


class Gateways:
    """Records the versions that model calls name."""

    def __init__(self):
        self.versions = []

    async def set_adapters(self, versions):
        self.versions.append(dict(versions))


@pytest.fixture(autouse=True)
def gateways(monkeypatch):
    monkeypatch.setattr(ModelServing, "gateways", Gateways(), raising=False)


async def sampled(url, adapter, key="s", tokens=1):
    """Return the folder of the adapter that sampled a reply and how it ended, or the status of the refusal."""
    status, answer = await generate(url, key, tokens, lora_path=adapter)
    return (answer["adapter"], answer["meta_info"]["finish_reason"]["type"]) if status == 200 else status


async def served(serving, adapter):
    """Return what the engines answer to calls with this adapter."""
    assert len(serving.engines.engine_urls) == 2
    return {await sampled(url, adapter) for url in serving.engines.engine_urls}


def in_use():
    raise ConfigError("a step uses it")


async def test_a_new_version_takes_the_place_of_the_old_one_on_every_engine(serve, save, tmp_path):
    first, second, other = save("first"), save("second"), save("other")
    async with serve() as (serving, _, _):
        assert (await serving.load_adapter("a", first)).version == 1
        await serving.load_adapter("b", other)
        assert await served(serving, "a@1") == {(str(first), "length")}
        router = serving.engines.router_url
        in_flight = [asyncio.create_task(sampled(router, "a@1", f"session-{i}", tokens=9999)) for i in range(8)]
        await eventually(lambda: (tmp_path / "engines.log").read_text().count("generates 9999") == 8)
        assert (await serving.load_adapter("a", second)).version == 2
        assert set(await asyncio.gather(*in_flight)) == {(str(first), "abort")}
        assert await served(serving, "a@2") == {(str(second), "length")}
        assert await served(serving, "a@1") == {400}
        assert await served(serving, "b@1") == {(str(other), "length")}
        assert serving.gateways.versions == [{"a": 1}, {"a": 1, "b": 1}, {"a": 2, "b": 1}]
        with pytest.raises(ConfigError, match="a step uses it"):
            await serving.unload_adapter("b", in_use)
        assert await served(serving, "b@1") == {(str(other), "length")}
        await serving.unload_adapter("b", lambda: None)
        assert await served(serving, "b@1") == {400}
        assert serving.adapters == {"a": 2}
        with pytest.raises(ConfigError, match=r"no adapter 'b' is loaded, only: a"):
            await serving.unload_adapter("b", lambda: None)
        assert (await serving.load_adapter("b", other)).version == 2  # the first version's name stays taken


@pytest.mark.slow
async def test_an_engine_that_refuses_is_restarted_and_loads_it_then(serve, save):
    folder = save("adapter")
    async with serve("healthy", "refuses") as (serving, events, engines):
        update = await serving.load_adapter("a", folder)
        [(failed, why)] = update.failed.items()
        assert "answered 400 to the request to load the adapter a@1" in why
        await eventually(lambda: all_serve(serving, restarts=1))
        assert [event.server for event in events if event.kind == "died"] == [failed]
        assert await served(serving, "a@1") == {(str(folder), "length")}
        os.kill(engines[0].pid, signal.SIGKILL)
        await eventually(lambda: all_serve(serving, restarts=2))
        assert await served(serving, "a@1") == {(str(folder), "length")}


async def test_an_adapter_that_no_engine_loads_changes_nothing(serve, config, save):
    folder = save("adapter")
    async with serve() as (serving, _, _):
        await serving.load_adapter("a", folder)
        for name in ("bad", "lost"):
            with pytest.raises(ServingError, match=r"no engine loaded the adapter a@2, so nothing changed"):
                await serving.load_adapter("a", save(name))
        assert await served(serving, "a@1") == {(str(folder), "length")}
        assert all_serve(serving, restarts=0)
        assert serving.gateways.versions == [{"a": 1}]
        assert AdapterStore(config).versions == {"a": 1}
        assert (await serving.load_adapter("a", folder)).failed == {}


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"rank": 5}, ConfigError, r"has rank 5, and serving\.lora_rank is 4"),
        ({"modules": ("up_proj",)}, ConfigError, r"changes up_proj, which serving\.lora_targets does not name"),
        ({"use_rslora": True}, ConfigError, r"use_rslora=True is not supported"),
        ({"bias": "all"}, ConfigError, r"bias=all is not supported"),
        ({"peft_type": "IA3"}, ConfigError, r"peft_type must be LORA"),
        ({"target_modules": ".*proj"}, ConfigError, r"must be a list of names"),
        ({"r": 3}, WeightsMismatch, r"lora_A\.weight is \(4, 4\) and should be \(3, 4\)"),
    ],
)
async def test_an_adapter_that_does_not_fit_reaches_no_engine(config, save, tmp_path, settings, error, message):
    config = config.model_copy(update={"serving": config.serving.model_copy(update={"lora_targets": ("q_proj",)})})
    serving = ModelServing(config, tmp_path)  # no engine is started
    with pytest.raises(error, match=message):
        await serving.load_adapter("a", save("adapter", **settings))
    assert serving.adapters == {}


async def test_folders_of_nothing_or_of_another_model_reach_no_engine(config, save, tmp_path, model_folder):
    serving = ModelServing(config, tmp_path)
    with pytest.raises(ConfigError, match=r"is not an adapter's folder: .* for adapter_config\.json"):
        await serving.load_adapter("a", tmp_path / "missing")
    with pytest.raises(ConfigError, match="is no name for an adapter"):
        await serving.load_adapter("a@1", save("adapter"))
    other = save_model(tmp_path / "other", shapes={"model.layers.7.self_attn.q_proj.weight": (8, 4)})
    with pytest.raises(WeightsMismatch, match=r"changes no matrix of the model.*Was it trained on another model"):
        await serving.load_adapter("a", save_adapter(tmp_path / "of-other", other, modules=("q_proj",)))
    cut = save("cut")
    (cut / "adapter_model.safetensors").write_bytes(b"\x08")
    with pytest.raises(ConfigError, match="is it still being written"):
        await serving.load_adapter("a", cut)


async def test_engines_without_adapters_are_refused(make_config, tmp_path):
    with pytest.raises(ConfigError, match=r"set serving\.lora_rank"):
        await ModelServing(make_config(), tmp_path).load_adapter("a", tmp_path)
    with pytest.raises(ValueError, match="lora_rank is for servers that this side starts"):
        ServingConfig(kind="external", urls=("http://127.0.0.1:1",), lora_rank=4)
    with pytest.raises(ValueError, match="lora_rank needs data_parallel=1"):
        ServingConfig(data_parallel=2, lora_rank=4)
    with pytest.raises(ValueError, match=r"--max-lora-rank is not allowed here: set serving\.lora_rank"):
        ServingConfig(extra_args=("--max-lora-rank", "8"))


async def test_new_weights_are_refused_with_adapters(config, tmp_path, model_folder):
    with pytest.raises(ConfigError, match=r"update_weights is not supported with serving\.lora_rank"):
        await ModelServing(config, tmp_path).update_weights(model_folder)


async def test_the_versions_of_an_adapter_are_never_used_twice(config, save):
    store, folder = AdapterStore(config), save("adapter")
    await store.commit(store.prepare("a", folder))
    await store.commit(store.prepare("b", save("other")))
    with pytest.raises(ConfigError, match=r"2 adapters are loaded, and serving\.max_adapters is 2"):
        store.prepare("c", folder)
    await store.remove("b")
    store = AdapterStore(config)  # a restarted trainer
    assert store.versions == {"a": 1}
    assert [store.prepare(name, folder).version for name in ("a", "b", "c")] == [2, 2, 1]


async def test_the_newest_adapters_must_still_be_there(config, save, tmp_path, make_config):
    store, folder = AdapterStore(config), save("adapter")
    await store.commit(store.prepare("a", folder))
    with pytest.raises(ConfigError, match=r"has loaded the adapters a: set serving\.lora_rank"):
        AdapterStore(config.model_copy(update={"serving": ServingConfig()}))
    save("adapter", seed=1)
    with pytest.raises(ConfigError, match=r"cannot serve its adapter a again.*has changed or is gone"):
        AdapterStore(config)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="cannot serve its adapter a again"):
        AdapterStore(config)
    (config.run_dir / "adapters.json").write_text(json.dumps({"a": 1}))
    with pytest.raises(ConfigError, match="unknown which adapters this run served last"):
        AdapterStore(config)
