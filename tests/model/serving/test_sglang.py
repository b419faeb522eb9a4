import json
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from builders import run_config
from rollout_backend.config import ExpertShape, ModelConfig, ServingConfig
from rollout_backend.errors import ConfigError, StartupError
from rollout_backend.model.serving.external_engine import ExternalEngine
from rollout_backend.model.serving.install import find_engine
from rollout_backend.model.serving.local_engine import ServerNode, sglang_command
from rollout_backend.model.serving.server_process import SERVER_PORTS
from rollout_backend.run.checks.model import check_experts
from rollout_backend.workbench.local.scripted import ScriptedEngine
from tests.emulators.scripted_experts import seeded_routing

MODEL = ModelConfig(path=Path("/models/Qwen3-8B"), name="qwen", context_length=4096)
PYTHON = Path("/opt/sglang/bin/python")
NODE = ServerNode("127.0.0.1", 4000)


def flags(argv: list[str]) -> dict[str, str]:
    """Return flag to value, "" for a flag without value."""
    pairs = zip(argv, [*argv[1:], "--"], strict=True)
    return {a.removeprefix("--"): "" if b.startswith("--") else b for a, b in pairs if a.startswith("--")}


def test_command_of_a_gpu_server():
    serving = ServingConfig(python=PYTHON, tensor_parallel=2, extra_args=("--mem-fraction-static", "0.7"))
    argv, env = sglang_command(MODEL, serving, ServerNode("10.0.0.3", 4000, first_gpu=2), inherited={})
    assert argv[:3] == ["/opt/sglang/bin/python", "-m", "sglang.launch_server"]
    given = flags(argv)
    assert int(given.pop("nccl-port")) in SERVER_PORTS, "reserved, because SGLang listens there much later"
    assert given == {
        "model-path": "/models/Qwen3-8B",
        "served-model-name": "qwen",
        "host": "10.0.0.3",
        "port": "4000",
        "device": "cuda",
        "dtype": "bfloat16",
        "weight-version": "0",
        "tp-size": "2",
        "context-length": "4096",
        "max-running-requests": "64",
        "sampling-defaults": "openai",
        "log-level-http": "warning",
        "incremental-streaming-output": "",
        "stream-interval": "8",
        "base-gpu-id": "2",
        "mem-fraction-static": "0.7",
    }
    assert env["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"
    assert env["SGLANG_VLM_CACHE_SIZE_MB"] == "0", "the cache of images outlives new weights"
    assert "PYTHONPATH" not in env
    assert "SGLANG_USE_CPU_ENGINE" not in env


def test_command_of_a_cpu_server():
    serving = ServingConfig(device="cpu", python=PYTHON, dtype="float32", threads=2)
    argv, env = sglang_command(MODEL, serving, NODE, inherited={})
    given = flags(argv)
    assert given["device"] == "cpu"
    assert given["max-total-tokens"] == "32768"
    assert given["attention-backend"] == "torch_native"
    assert "sleep-on-idle" in given
    assert "base-gpu-id" not in given
    assert env["OMP_NUM_THREADS"] == "2"
    assert env["SGLANG_USE_CPU_ENGINE"] == "1"
    assert (Path(env["PYTHONPATH"]) / "sitecustomize.py").is_file()


def test_adapters_have_room_for_the_requests_without_one():
    serving = ServingConfig(python=PYTHON, lora_rank=16, lora_targets=("q_proj", "v_proj"), max_adapters=3)
    argv = sglang_command(MODEL, serving, NODE, inherited={})[0]
    given = flags(argv)
    assert ("enable-lora" in given, given["max-lora-rank"], given["max-loras-per-batch"]) == (True, "16", "4")
    at = argv.index("--lora-target-modules")
    assert argv[at + 1 : at + 3] == ["q_proj", "v_proj"]
    assert "enable-lora" not in flags(sglang_command(MODEL, ServingConfig(python=PYTHON), NODE, inherited={})[0])


@pytest.mark.parametrize(
    ("setting", "flag"),
    [("trust_remote_code", "trust-remote-code"), ("routed_experts", "enable-return-routed-experts")],
)
def test_an_option_of_the_model_is_given_only_if_it_is_set(setting, flag):
    models = (MODEL, MODEL.model_copy(update={setting: True}))
    given = [sglang_command(model, ServingConfig(python=PYTHON), NODE, inherited={})[0] for model in models]
    assert [flag in flags(argv) for argv in given] == [False, True]


def test_engine_inherits_only_needed_variables():
    ours = {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "3",
        "PYTHONPATH": "/ours",
        "PYTHONHOME": "/ours",
        "VIRTUAL_ENV": "/ours",
        "RAY_ADDRESS": "ray",
        "ROLLOUT__STORAGE__BUCKET": "b",
    }
    _, env = sglang_command(MODEL, ServingConfig(python=PYTHON), NODE, inherited=ours)
    assert env["PATH"] == "/bin"
    assert env["CUDA_VISIBLE_DEVICES"] == "3"
    assert not {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RAY_ADDRESS", "ROLLOUT__STORAGE__BUCKET"} & set(env)


def test_interpreter_of_the_engine(monkeypatch, tmp_path):
    argv, _ = sglang_command(MODEL, ServingConfig(), NODE, inherited={})
    assert argv[0] == sys.executable
    monkeypatch.setenv("ROLLOUT_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="rollout engine install"):
        sglang_command(MODEL, ServingConfig(device="cpu"), NODE, inherited={})


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_sglang_accepts_the_command_line(device):
    """SGLang's own parser accepts it; that needs no GPU."""
    sizes = {"tensor_parallel": 8, "attention_data_parallel": 4, "expert_parallel": 2} if device == "cuda" else {}
    nodes = {"kind": "ray", "pipeline_parallel": 2, "nodes_per_server": 2}
    serving = ServingConfig(device=device, python=find_engine(), max_total_tokens=4096, **nodes, **sizes)
    argv, _ = sglang_command(MODEL, serving, ServerNode("0.0.0.0", 4000, 4, 1, "10.0.0.1:5000"))
    _, env = sglang_command(MODEL, ServingConfig(device="cpu", python=find_engine()), NODE)  # for the import
    script = (
        "import json, sys; from sglang.srt.server_args import prepare_server_args;"
        "args = prepare_server_args(sys.argv[1:]);"
        "print(json.dumps([args.tp_size, args.device, args.base_gpu_id, args.context_length, args.sampling_defaults,"
        "args.max_total_tokens, args.max_running_requests, args.log_level_http, args.served_model_name,"
        "args.pp_size, args.dp_size, args.attn_dp_size, args.ep_size, args.nnodes, args.node_rank,"
        "args.dist_init_addr]))"
    )
    done = subprocess.run([argv[0], "-c", script, *argv[3:]], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tensor, first_gpu, attention, experts = (8, 4, 4, 2) if device == "cuda" else (1, 0, 1, 1)
    assert json.loads(done.stdout.splitlines()[-1]) == [
        *(tensor, device, first_gpu, 4096, "openai", 4096, 64, "warning", "qwen"),
        *(2, 1, attention, experts, 2, 1, "10.0.0.1:5000"),
    ]


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"serving": {"engine": "vllm"}}, r"needs serving\.engine=sglang, not vllm"),
        ({"serving": {"extra_args": ["--enable-hierarchical-cache"]}}, "remove --enable-hierarchical-cache"),
        ({"router": {"policy": "random"}}, r"whose calls pass no sglang-router: remove it, or set router\.kind=smg"),
    ],
)
def test_settings_that_lose_routed_experts_are_refused(sections, words):
    with pytest.raises(ConfigError, match=rf"model\.routed_experts=true.*{words}"):
        run_config(model={"path": "model", "routed_experts": True}, **sections)


async def test_an_external_server_without_what_the_settings_need_is_refused():
    with ScriptedEngine([]) as engine:
        serving = {"kind": "external", "urls": [engine.url]}
        config = run_config(model={"path": "model", "routed_experts": True}, sampling={"seed": 1}, serving=serving)
        server = ExternalEngine("engine-0", engine.url, config)
        with pytest.raises(StartupError, match=r"engine-0: .*start SGLang with --enable-return-routed-experts"):
            await server.start()
        engine.routing = seeded_routing(ExpertShape(1, 2, 4))
        await server.start()
        engine.hierarchical_cache = True
        with pytest.raises(StartupError, match="runs with --enable-hierarchical-cache"):
            await server.start()
        engine.hierarchical_cache = engine.deterministic = False
        with pytest.raises(StartupError, match=r"engine-0: sampling\.seed .*--enable-deterministic-inference"):
            await server.start()
        assert engine.requests == []


def test_a_seed_needs_an_engine_that_reads_it():
    with pytest.raises(ConfigError, match=r"sampling.seed: SGLang ignores seeds.*serving\.extra_args"):
        run_config(sampling={"seed": 1}, serving={})
    run_config(sampling={"seed": 1}, serving={"extra_args": ["--enable-deterministic-inference"]})
    run_config(sampling={"seed": 1}, serving={"engine": "vllm"})


class SilentEngine(ScriptedEngine):
    """Does not tell how it was started, as SGLang 0.5.12 where verl 0.9.1 starts it."""

    def _app(self):
        app = super()._app()
        app.router.routes.insert(0, Route("/server_info", lambda _: PlainTextResponse("Internal error", 500)))
        return app


async def test_an_external_server_that_does_not_tell_how_it_was_started_is_used(caplog):
    with SilentEngine([]) as engine:
        serving = {"kind": "external", "urls": [engine.url]}
        config = run_config(model={"path": "model", "routed_experts": True}, sampling={"seed": 1}, serving=serving)
        await ExternalEngine("engine-0", engine.url, config).start()
    assert "answers 500: whether it returns routed experts is unknown" in caplog.text
    assert "answers 500: whether seeds have an effect is unknown" in caplog.text


@pytest.mark.parametrize("experts", [0, 8])
def test_the_model_of_routed_experts_is_checked(tmp_path, experts):
    config = {"num_hidden_layers": 4, "num_experts": experts, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = check_experts(ModelConfig(path=tmp_path, routed_experts=True))
    if experts:
        assert (found.level, found.text) == ("ok", "2 of 8 experts in 4 layers: 8 bytes per token")
    else:
        assert found.level == "problem"
