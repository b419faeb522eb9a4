"""Where a server's processes run: what they reserve, and the command line of each node."""

from pathlib import Path

import pytest

from rollout_backend.config import ModelConfig, ServingConfig
from rollout_backend.errors import ConfigError
from rollout_backend.model.serving.local_engine import ServerNode, sglang_command, weight_bytes
from rollout_backend.model.serving.ray_servers import Placement

MODEL = ModelConfig(path=Path("/models/GLM-5"), name="glm", context_length=4096)
EIGHT = {"CPU": 64.0, "GPU": 8.0}


def on_ray(**serving) -> ServingConfig:
    return ServingConfig(kind="ray", python=Path("python"), **serving)


@pytest.mark.parametrize(
    ("sizes", "bundles", "strategy", "text"),
    [
        ({}, [1], "STRICT_PACK", "1 GPU on one machine"),
        ({"tensor_parallel": 4, "pipeline_parallel": 2}, [8], "STRICT_PACK", "8 GPUs on one machine"),
        ({"tensor_parallel": 2, "data_parallel": 4}, [8], "STRICT_PACK", "8 GPUs on one machine"),
        ({"tensor_parallel": 8, "attention_data_parallel": 8}, [8], "STRICT_PACK", "8 GPUs on one machine"),
        (
            {"tensor_parallel": 8, "pipeline_parallel": 4, "nodes_per_server": 4},
            [8, 8, 8, 8],
            "STRICT_SPREAD",
            "8 GPUs on each of 4 machines",
        ),
    ],
)
def test_a_server_reserves_its_gpus_once(sizes, bundles, strategy, text):
    placement = Placement.of(on_ray(**sizes))
    assert [bundle["GPU"] for bundle in placement.bundles] == bundles
    assert placement.strategy == strategy
    assert str(placement) == text


def test_a_server_on_the_cpu_reserves_its_threads():
    assert Placement.of(on_ray(device="cpu", threads=3)) == Placement(({"CPU": 3.0},), "STRICT_PACK")
    two = Placement.of(on_ray(device="cpu", threads=3, pipeline_parallel=2, nodes_per_server=2))
    assert two == Placement(({"CPU": 3.0},) * 2, "STRICT_SPREAD")
    assert two.describe([{"CPU": 2.0}, {}]) == "2 + 0 CPUs on 2 machines"


@pytest.mark.parametrize(
    ("sizes", "machines", "servers"),
    [
        ({"tensor_parallel": 4}, [EIGHT, EIGHT, {"CPU": 64.0}], 4),
        ({"tensor_parallel": 4}, [{"CPU": 64.0, "GPU": 7.0}, {"CPU": 64.0, "GPU": 3.0}], 1),
        ({"tensor_parallel": 16, "nodes_per_server": 2}, [EIGHT] * 5, 2),
        # One machine with room for two nodes must not hold both nodes of one server.
        ({"tensor_parallel": 8, "nodes_per_server": 2}, [EIGHT, {"CPU": 64.0, "GPU": 4.0}], 1),
        ({"tensor_parallel": 8, "nodes_per_server": 2}, [EIGHT], 0),
    ],
)
def test_auto_counts_the_servers_that_fit(sizes, machines, servers):
    assert Placement.of(on_ray(**sizes)).servers_on(machines) == servers


def test_each_node_of_a_server_gets_its_rank_and_the_rendezvous():
    serving = on_ray(tensor_parallel=16, expert_parallel=16, attention_data_parallel=4, nodes_per_server=2)
    for rank, host in enumerate(("10.0.0.1", "10.0.0.2")):
        argv, _ = sglang_command(MODEL, serving, ServerNode(host, 4000, 0, rank, "10.0.0.1:5000"), inherited={})
        line = " ".join(argv)
        assert f"--host {host} --port 4000" in line
        assert "--tp-size 16" in line
        assert "--attn-dp-size 4 --ep-size 16" in line
        assert f"--nnodes 2 --node-rank {rank} --dist-init-addr 10.0.0.1:5000" in line
        assert "--pp-size" not in line
    argv, _ = sglang_command(MODEL, on_ray(pipeline_parallel=2, data_parallel=2), ServerNode("h", 1), inherited={})
    assert argv[argv.index("--pp-size") :][:4] == ["--pp-size", "2", "--dp-size", "2"]
    assert "--nccl-port" not in argv, "each replica needs its own"
    assert not {"--nnodes", "--node-rank", "--dist-init-addr"} & {*argv}


@pytest.mark.parametrize(
    ("serving", "message"),
    [
        ({"expert_parallel": 3, "tensor_parallel": 8}, "expert_parallel=3 must divide tensor_parallel=8"),
        ({"attention_data_parallel": 2}, "attention_data_parallel=2 must divide tensor_parallel=1"),
        ({"data_parallel": 2, "attention_data_parallel": 2, "tensor_parallel": 2}, "exclude each other"),
        ({"data_parallel": 2, "nodes_per_server": 2}, "data_parallel needs nodes_per_server=1"),
        ({"tensor_parallel": 8, "nodes_per_server": 3}, "nodes_per_server=3 does not divide"),
        ({"kind": "process", "tensor_parallel": 8, "nodes_per_server": 2}, "nodes_per_server above 1 needs kind=ray"),
        ({"kind": "process", "servers": "auto"}, "servers=auto counts the GPUs of a Ray cluster"),
        ({"device": "cpu", "tensor_parallel": 2}, "need GPUs"),
        ({"servers": 2, "min_servers": 3}, "min_servers=3 is more than servers=2"),
        ({"weight_transfer": "gloo", "data_parallel": 2}, "leave data_parallel at 1, or set weight_transfer=disk"),
        ({"extra_args": ["--tp=8"]}, "--tp is not allowed here: set serving.tensor_parallel"),
        (
            {"extra_args": ["--dp", "8", "--enable-dp-attention"]},
            "--dp is not allowed here: set serving.data_parallel",
        ),
    ],
)
def test_sizes_that_cannot_work_are_refused_by_name(make_config, serving, message):
    with pytest.raises(ConfigError, match=message):
        make_config(serving={"kind": "ray", **serving})


def test_the_startup_timeout_follows_the_size_of_the_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert weight_bytes(tmp_path) == 0
    for shard in range(2):
        with (tmp_path / f"model-{shard}.safetensors").open("wb") as file:
            file.truncate(70_000_000_000)
    assert weight_bytes(tmp_path) == 140_000_000_000
    assert ServingConfig().startup_s() == 300
    assert ServingConfig().startup_s(weight_bytes(tmp_path)) == 580
    assert ServingConfig(startup_timeout_s=60).startup_s(weight_bytes(tmp_path)) == 60


def test_the_gpus_that_a_run_pays_for_are_counted(make_config):
    sizes = {"kind": "ray", "servers": 2, "tensor_parallel": 4, "pipeline_parallel": 2}
    assert make_config(serving=sizes, prices={"gpu_hour": 2}).gpus == 16
    with pytest.raises(ConfigError, match=r"servers=auto also needs prices\.gpus"):
        make_config(serving={**sizes, "servers": "auto"}, prices={"gpu_hour": 2})
