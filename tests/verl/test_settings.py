import json
import re
import shlex
import shutil
import types
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
from omegaconf import OmegaConf

from agent_wrapper.contract.keys import ID_PATTERN
from rollout_backend.errors import ConfigError
from rollout_backend.verl.early_checks import (
    check_engines,
    check_image_cache,
    check_machine,
    set_streams,
)
from rollout_backend.verl.verl_settings import (
    is_asynchronous,
    last_global_step,
    max_staleness_of,
    resumes_steps,
    run_id_of,
    sampling_of,
    settings_of,
)
from trainings import composed, verl_settings

ROOT = Path(__file__).parents[2]
ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/my_agent-a1B2c3D4e5"
STREAMS = "actor_rollout_ref.rollout.engine_kwargs.sglang.incremental_streaming_output"
YARN = {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}}
OWN = {"storage": {"bucket": "rollouts"}, "runtime": {"kind": "agentcore", "arn": ARN}}


def verl_config(own: object = OWN, **rollout: object):
    return OmegaConf.create(
        {
            "data": {"train_batch_size": 2},
            "trainer": {"project_name": "my project", "experiment_name": "run/1", "v1": {"trainer_mode": "sync"}},
            "actor_rollout_ref": {
                "model": {"path": "/models/Qwen3-4B"},
                "rollout": {
                    "n": 8,
                    "temperature": 0.9,
                    "top_p": 0.95,
                    "top_k": 50,
                    "prompt_length": 1000,
                    "response_length": 200,
                    "max_model_len": None,
                    "val_kwargs": {"temperature": 0.5, "top_p": 0.8, "top_k": -1, "do_sample": True, "n": 1},
                    "custom": None if own is None else {"rollout_backend": own},
                    **rollout,
                },
            },
        }
    )


def test_settings_of_verl_are_used():
    config = settings_of(verl_config(), ["10.0.0.1:30000", "10.0.0.2:30000"])
    assert config.run_id == run_id_of({"project_name": "my project", "experiment_name": "run/1"})
    assert config.model.served_name == "Qwen3-4B"
    assert config.model.context_length == 1200
    assert config.group.size == 8
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (0.9, 0.95, 50)
    assert config.sampling.max_tokens == 200
    assert config.serving.kind == "external"
    assert config.serving.urls == ("http://10.0.0.1:30000", "http://10.0.0.2:30000")


@pytest.mark.parametrize("in_a_file", [False, True])
def test_own_settings_take_precedence(tmp_path, in_a_file):
    own = {**OWN, "run_id": "mine", "group": {"policy": "strict"}, "model": {"context_length": 4096}}
    file = tmp_path / "backend.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(own)))
    config = settings_of(verl_config(str(file) if in_a_file else own), ["a:1"])
    assert config.run_id == "mine"
    assert (config.group.size, config.group.policy) == (8, "strict")
    assert config.model.context_length == 4096


@pytest.mark.parametrize(
    ("section", "function"),
    [
        (
            {"reward": {"custom_reward_function": {"path": "file:///r/sums.py", "name": None}}},
            "/r/sums.py:compute_score",
        ),
        ({"custom_reward_function": {"path": "pkg://my.rewards", "name": "check"}}, "my.rewards:check"),
        ({"reward": {"custom_reward_function": {"path": None, "name": "compute_score"}}}, None),
    ],
)
def test_a_reward_function_of_verl_is_the_scorer(section, function):
    config = settings_of(OmegaConf.merge(verl_config({**OWN, "scoring": {"timeout_s": 9}}), section), ["a:1"])
    assert (config.scoring.function, config.scoring.timeout_s) == (function, 9)


def test_two_scorers_are_refused():
    section = {"reward": {"custom_reward_function": {"path": "sums.py", "name": "check"}}}
    for other in ({"function": "other.py:score"}, {"command": ["verify"]}):
        with pytest.raises(ConfigError, match=r"another one: remove one of the two|exclude each other"):
            settings_of(OmegaConf.merge(verl_config({**OWN, "scoring": other}), section), ["a:1"])


@pytest.mark.parametrize(
    ("own", "match"),
    [
        (None, r"\+actor_rollout_ref\.rollout\.custom\.rollout_backend is missing.*storage\.bucket"),
        ({**OWN, "bukcet": 1}, r"under actor_rollout_ref\.rollout\.custom\.rollout_backend: .*\s+bukcet: no such"),
        ({"runtime": OWN["runtime"]}, r"storage: is missing"),
        (
            {**OWN, "serving": {"servers": 2}},
            r"rollout_backend\.serving: verl runs the servers, so only max_restarts and restart_window_s and",
        ),
        ("/no/such/file.yaml", r"cannot read the settings /no/such/file\.yaml"),
        ([1], r"must be the path of a YAML file or a tree of settings"),
        ({**OWN, "sampling": {"top_k": 40}}, r"sampling\.top_k=40.*actor_rollout_ref\.rollout\.temperature"),
        (
            {**OWN, "model": {"routed_experts": True}},
            r"enable_rollout_routing_replay=False: remove model\.routed_experts",
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_place(own, match):
    with pytest.raises(ConfigError, match=match):
        settings_of(verl_config(own), ["a:1"])


@pytest.mark.parametrize(
    ("own", "rollout", "seed"),
    [
        ({}, {"seed": 5}, None),
        ({}, {"seed": 5, "full_determinism": True}, 5),
        ({"sampling": {"seed": 7}}, {"seed": 5, "full_determinism": True}, 7),
    ],
)
def test_the_seed_of_replies_is_verls_if_it_asks_for_determinism(own, rollout, seed):
    assert settings_of(verl_config({**OWN, **own}, **rollout), ["a:1"]).sampling.seed == seed


@pytest.mark.parametrize(
    ("own", "rollout"),
    [
        ({}, {"seed": 5, "full_determinism": True}),
        ({"sampling": {"seed": 7}}, {}),
        ({"gateway": {"agent_sampling_overrides": ["seed"]}}, {}),
    ],
)
def test_seeds_that_sglang_would_ignore_are_refused(own, rollout):
    config = verl_config({**OWN, **own}, name="sglang", **rollout)
    with pytest.raises(ConfigError, match=r"add \+.*\.sglang\.enable_deterministic_inference=True"):
        settings_of(config, ["a:1"])
    config.actor_rollout_ref.rollout.engine_kwargs = {"sglang": {"enable_deterministic_inference": True}}
    settings_of(config, ["a:1"])


def test_validation_and_greedy_sampling():
    rollout = verl_config().actor_rollout_ref.rollout
    assert sampling_of(rollout, validate=True, greedy=False).temperature == 0.5
    assert sampling_of(rollout, validate=False, greedy=True).temperature == 0.0
    rollout.val_kwargs.do_sample = False
    assert sampling_of(rollout, validate=True, greedy=False).temperature == 0.0
    assert sampling_of(rollout, validate=False, greedy=False).temperature == 0.9


MASK = {"training": {"mask": ["row_cut"]}}


def test_masks_are_refused_where_a_missing_row_counts_as_0():
    config = verl_config({**OWN, **MASK})
    config.trainer.use_v1, config.algorithm = False, {"adv_estimator": "grpo"}
    with pytest.raises(ConfigError, match=r"adv_estimator=grpo .*training\.mask"):
        settings_of(config, ["a:1"])


def test_an_estimator_that_would_train_nothing_is_refused():
    """verl's default is n=1."""
    config = verl_config(n=1)
    config.algorithm = {"adv_estimator": "rloo_skip_missing"}
    with pytest.raises(ConfigError, match=r"adv_estimator=rloo_skip_missing .*rollout\.n=1 .*at least 2"):
        settings_of(config, ["a:1"])
    config.trainer.val_only = True
    assert settings_of(config, ["a:1"]).group.size == 1


@pytest.mark.parametrize(
    ("use_v1", "adv_estimator", "own", "warning"),
    [
        (True, "rloo", {"group": {"min_viable": 1}}, "its raw reward as advantage"),
        (True, "grpo", {"group": {"min_viable": 1, "policy": "strict"}}, ""),
        (True, "grpo", MASK, ""),
        (True, "grpo_skip_missing", {"group": {"min_viable": 1}}, ""),
        (False, "grpo", {}, "for a reward of 0 on the legacy trainer"),
        (False, "grpo", {"group": {"policy": "strict"}}, ""),
        (False, "grpo_skip_missing", MASK, ""),
    ],
)
def test_an_estimator_that_misjudges_groups_with_lost_rollouts_is_named(use_v1, adv_estimator, own, warning, caplog):
    config = verl_config({**OWN, **own})
    config.trainer.use_v1, config.algorithm = use_v1, {"adv_estimator": adv_estimator}
    settings_of(config, ["a:1"])
    assert [adv_estimator in text and warning in text for text in caplog.messages] == [True] * bool(warning)


@pytest.mark.parametrize(
    ("processor", "environ", "frozen", "images", "refused"),
    [
        ("Qwen2VLImageProcessorFast", {"SGLANG_VLM_CACHE_SIZE_MB": "4096"}, False, 16, True),
        ("Qwen2VLImageProcessorFast", {"SGLANG_VLM_CACHE_SIZE_MB": "0"}, False, 16, False),
        ("Qwen2VLImageProcessorFast", {}, True, 16, False),
        ("Qwen2VLImageProcessorFast", {}, False, 0, False),
        (None, {}, False, 16, False),
    ],
)
def test_an_image_encoder_is_not_trained_while_servers_keep_its_old_output(
    tmp_path, processor, environ, frozen, images, refused
):
    if processor is not None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": processor}))
    config = verl_config({**OWN, "gateway": {"max_images": images}})
    config.actor_rollout_ref.model.path = str(tmp_path)
    settings, actor = settings_of(config, ["a:1"]), OmegaConf.create({"freeze_vision_tower": frozen})
    with pytest.raises(ConfigError, match="SGLANG_VLM_CACHE_SIZE_MB") if refused else nullcontext():
        check_image_cache(actor, settings, environ)


@pytest.mark.parametrize(
    ("images", "correction", "val_only", "refused"),
    [
        (16, {}, False, True),
        (16, {}, True, False),
        (16, {"rollout_rs": "seq_mean_k3", "bypass_mode": True}, False, True),
        (16, {"rollout_rs": "seq_mean_k3", "bypass_mode": False}, False, False),
        (0, {}, False, False),
    ],
)
def test_images_are_not_trained_if_no_row_is_rejected(tmp_path, monkeypatch, images, correction, val_only, refused):
    from rollout_backend.verl import manager

    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    config = verl_config({**OWN, "gateway": {"max_images": images}})
    config.actor_rollout_ref.model.path = str(tmp_path)
    config.actor_rollout_ref.actor = {"freeze_vision_tower": True}
    config.algorithm = {"adv_estimator": "grpo", "rollout_correction": correction}
    config.trainer.update({"val_only": val_only, "use_v1": False})
    # A training with neither the sampler nor the dataset meets the check when verl makes the manager.
    verl_api = types.SimpleNamespace(check_version=bool, load_balancer=bool, server_addresses=lambda _: ["a:1"])
    monkeypatch.setattr(manager, "verl_api", verl_api)
    monkeypatch.setattr(manager, "adapter_of", Mock(side_effect=ConfigError("later")))
    with pytest.raises(ConfigError, match="rollout_rs=seq_mean_k3" if refused else "later"):
        manager.CloudAgentLoopManager.create(config, None)


ASYNCHRONOUS = "trainer.v1.trainer_mode=separate_async"


def test_a_run_is_resumed_unless_verl_does_not_load_its_checkpoint():
    for mode in ((), (ASYNCHRONOUS,)):
        assert resumes_steps(verl_settings(*mode).trainer)
        assert not resumes_steps(verl_settings(*mode, "trainer.resume_mode=disable").trainer)


@pytest.mark.parametrize(
    ("overrides", "limit"),
    [
        ([], 7),  # verl's default drops groups that span more than 8 versions
        (["trainer.v1.sampler.max_off_policy_threshold=null"], None),
        (["trainer.v1.sampler.max_off_policy_strategy=wait"], None),
        (["+trainer.v1.sampler.sampler_kwargs.max_staleness=2"], 2),
    ],
)
def test_rollouts_are_resumed_only_if_verl_would_not_drop_them(overrides, limit):
    assert max_staleness_of(verl_settings(*overrides).trainer) == limit


def test_verls_servers_sleep_between_batches_where_it_trains_on_their_devices():
    assert not is_asynchronous(verl_settings().trainer)
    for asynchronous in (ASYNCHRONOUS, "trainer.v1.trainer_mode=colocate_async"):
        assert is_asynchronous(verl_settings(asynchronous).trainer)
        assert not is_asynchronous(verl_settings(asynchronous, "trainer.use_v1=False").trainer)


@pytest.mark.parametrize(
    ("overrides", "step"),
    [
        (["trainer.total_training_steps=7"], 7),
        (["actor_rollout_ref.actor.optim.total_training_steps=12"], 12),  # written by verl
        ([ASYNCHRONOUS, "actor_rollout_ref.actor.optim.total_training_steps=12"], 3),  # four updates in a step
        ([], None),
    ],
)
def test_the_last_step_is_the_one_after_which_verl_ends(overrides, step):
    assert last_global_step(verl_settings(*overrides)) == step


@pytest.mark.parametrize(
    "page", ["README.md", "docs/training.md", "docs/training-options.md", "docs/training-async.md"]
)
def test_the_settings_in_the_docs_exist_in_verl(page):
    """With a + where verl lacks the key, and without where it has it: Hydra refuses either mistake."""
    text = (ROOT / page).read_text()
    ours = r"\+?(?:actor_rollout_ref|algorithm|data|trainer)\.[\w.]+"
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", text, flags=re.M | re.S)).replace("\\\n", " ")
    given = [word for word in shlex.split(blocks, comments=True) if re.match(f"{ours}=", word)]
    assert given
    config = composed(*given)
    names = sorted(set(re.findall(f"`({ours})", text)), reverse=True)  # a key of a section before the section
    composed(*(f"{name}=x" for name in names))
    if page == "docs/training.md":
        assert config.algorithm.adv_estimator == "grpo_skip_missing"
    if page == "docs/training-async.md":
        assert config.trainer.v1.sampler.sampler_kwargs.max_staleness == 2


def test_routed_experts_are_recorded_if_verl_asks_its_servers_for_them():
    assert not settings_of(verl_config(), ["a:1"]).model.routed_experts
    recording = verl_config(enable_rollout_routing_replay=True)
    assert settings_of(recording, ["a:1"]).model.routed_experts


@pytest.mark.parametrize(
    ("overrides", "sent_once"),
    [
        (["actor_rollout_ref.rollout.name=sglang"], True),
        (["actor_rollout_ref.rollout.name=sglang", f"+{STREAMS}=False"], False),
        (["actor_rollout_ref.rollout.name=vllm"], None),
    ],
)
def test_verls_sglang_sends_each_token_of_a_stream_once(overrides, sent_once):
    config = verl_settings(*overrides)
    set_streams(config)
    assert OmegaConf.select(config, STREAMS) is sent_once


def test_a_model_is_taken_from_where_verl_copies_it(tmp_path):
    model = tmp_path / "my-model"
    model.mkdir()
    config = verl_config()
    config.actor_rollout_ref.model.path, config.actor_rollout_ref.model.use_shm = str(model), True
    settings = settings_of(config, ["a:1"]).model
    try:
        assert (settings.served_name, settings.path.name) == ("my-model", "my-model")
        assert settings.path.is_relative_to("/dev/shm/verl-cache")
    finally:
        shutil.rmtree(settings.path.parent)
    config.actor_rollout_ref.model.path = str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"model\.path=.*nowhere cannot be copied to this machine"):
        settings_of(config, ["a:1"])


def test_what_verls_engines_would_refuse_is_found_before_they_start(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1000, "num_attention_heads": 6}))
    root = verl_config(tensor_model_parallel_size=4, name="vllm", max_model_len=1200)
    root.actor_rollout_ref.model.path = str(tmp_path)
    found = {result.setting.rpartition(".")[2]: result for result in check_engines(root, settings_of(root, ["a:1"]))}
    assert re.search("1,200 .* 1,000", found["max_model_len"].text)
    assert "4 does not divide the model's 6" in found["tensor_model_parallel_size"].text
    assert [result.level for result in found.values()] == ["problem", "problem", "warning"], "vLLM is not installed"
    fits = verl_config(tensor_model_parallel_size=3, max_model_len=1000, name="sglang_cpu")
    fits.actor_rollout_ref.model.path = str(tmp_path)
    assert [*check_engines(fits, settings_of(fits, ["a:1"]))] == []


@pytest.mark.parametrize(
    ("more", "name", "asked", "overridden", "context", "refused"),
    [
        ({}, "sglang", None, None, 1000, False),
        ({}, "vllm", None, None, 1000, False),
        ({}, "sglang", 1100, None, 1100, True),
        ({}, "sglang", 1100, 4000, 1100, False),
        (YARN, "sglang", None, None, 1200, False),
        (YARN, "vllm", None, None, 1000, False),
        (YARN, "sglang", 1100, None, 1100, True),
    ],
)
def test_the_context_is_that_of_verls_servers(tmp_path, more, name, asked, overridden, context, refused):
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1000, **more}))
    config = verl_config(name=name, max_model_len=asked, tensor_model_parallel_size=1)
    override = {"max_position_embeddings": overridden}
    config.actor_rollout_ref.model.update({"path": str(tmp_path), "override_config": override})
    settings = settings_of(config, ["a:1"])
    assert settings.model.context_length == context
    problems = [result for result in check_engines(config, settings) if result.level == "problem"]
    assert [result.setting.rpartition(".")[2] for result in problems] == ["max_model_len"] * refused


def test_a_machine_without_room_for_a_training_is_warned_of(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    root = verl_config()
    root.actor_rollout_ref.model.path = str(tmp_path)
    root.trainer.update({"save_freq": 20, "default_local_dir": str(tmp_path / "checkpoints" / "run")})
    settings = settings_of(root, ["a:1"])

    def settings_with(total, free):
        found = check_machine(root, settings, lambda folder: types.SimpleNamespace(total=total, free=free))
        return [result.setting for result in found]

    assert settings_with(64 << 20, 5999) == ["/dev/shm", "trainer.default_local_dir"]
    assert settings_with(10 << 30, 6000) == []
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("{}\n" * 640)
    root.data = {"train_files": str(tasks), "train_batch_size": 64}
    root.trainer.total_epochs = 10  # 100 steps, of which each 20th is saved
    assert settings_with(10 << 30, 5 * 6000) == []
    assert settings_with(10 << 30, 5 * 6000 - 1) == ["trainer.default_local_dir"]
    root.trainer.max_actor_ckpt_to_keep = 2
    assert settings_with(10 << 30, 2 * 6000) == []
    assert settings_with(10 << 30, 2 * 6000 - 1) == ["trainer.default_local_dir"]


LONG = "qwen3_4b_grpo_swe_bs256_n8_lr1e-6_kl0.001_clip0.28_temp1.0_len32768_turns40_tool_bash_edit_reward_v2_"
NAMES = [
    *(("verl_examples", name) for name in ("gsm8k", "agent_v1", "agent-v1", "agent v1", "agent/v1", "Agent_v1")),
    *(("verl", name) for name in ("", "run", "数学基线", "数学新奖励", "実験-1", "対照-1", "reward>0", "reward<0")),
    *(("verl", name) for name in (f"{LONG}seed1", f"{LONG}seed2", ".", "..", "-", "a" * 200, "a" * 201)),
    *(("math", "grpo-1"), ("math-grpo", "1"), ("math-", "grpo-1"), ("", ""), ("", "gsm8k"), ("-", "-")),
]


def test_different_names_of_a_training_are_different_runs():
    ids = [run_id_of({"project_name": project, "experiment_name": name}) for project, name in NAMES]
    assert len({*ids}) == len(NAMES)
    assert all(re.fullmatch(ID_PATTERN, each) for each in ids)
    assert ids[0] == "verl_examples-gsm8k"
    assert run_id_of({}) == run_id_of({"project_name": None, "experiment_name": None})
