import pytest
from omegaconf import OmegaConf

from rollout_backend.errors import ConfigError
from rollout_backend.verl.settings import sampling_of, settings_of

ARN = "arn:aws:bedrock-agentcore:us-east-1:123456789012:runtime/my_agent-a1B2c3D4e5"
OWN = {"storage": {"bucket": "rollouts"}, "runtime": {"kind": "agentcore", "arn": ARN}}


def verl_config(own: object = OWN, **rollout: object):
    return OmegaConf.create(
        {
            "trainer": {"project_name": "my project", "experiment_name": "run/1"},
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


def test_what_verl_says_is_not_asked_again():
    config = settings_of(verl_config(), ["10.0.0.1:30000", "10.0.0.2:30000"])
    assert config.run_id == "my-project-run-1"
    assert config.model.served_name == "Qwen3-4B"
    assert config.model.context_length == 1200
    assert config.group.size == 8
    assert (config.sampling.temperature, config.sampling.top_p, config.sampling.top_k) == (0.9, 0.95, 50)
    assert config.sampling.max_tokens == 200
    assert config.serving.kind == "external"
    assert config.serving.urls == ("http://10.0.0.1:30000", "http://10.0.0.2:30000")


def test_ones_own_settings_lie_above():
    own = {**OWN, "run_id": "mine", "group": {"policy": "strict"}, "model": {"context_length": 4096}}
    config = settings_of(verl_config(own), ["a:1"])
    assert config.run_id == "mine"
    assert (config.group.size, config.group.policy) == (8, "strict")
    assert config.model.context_length == 4096


def test_how_long_a_dead_engine_is_waited_for_is_ones_own():
    config = settings_of(verl_config({**OWN, "serving": {"startup_timeout_s": 30, "max_restarts": 0}}), ["a:1"])
    assert (config.serving.startup_timeout_s, config.serving.max_restarts) == (30, 0)
    assert config.serving.urls == ("http://a:1",)


def test_they_may_stand_in_a_file(tmp_path):
    file = tmp_path / "backend.yaml"
    file.write_text(OmegaConf.to_yaml(OmegaConf.create(OWN)))
    assert settings_of(verl_config(str(file)), ["a:1"]).storage.bucket == "rollouts"


@pytest.mark.parametrize(
    ("own", "match"),
    [
        (None, r"\+actor_rollout_ref\.rollout\.custom\.rollout_backend is missing.*storage\.bucket"),
        ({**OWN, "bukcet": 1}, r"under actor_rollout_ref\.rollout\.custom\.rollout_backend: .*\s+bukcet: no such"),
        ({"runtime": OWN["runtime"]}, r"storage: is missing"),
        (
            {**OWN, "serving": {"servers": 2}},
            r"rollout_backend\.serving: verl runs the servers, so only max_restarts and",
        ),
        ("/no/such/file.yaml", r"cannot read the settings /no/such/file\.yaml"),
        ([1], r"must be the path of a YAML file or a tree of settings"),
    ],
)
def test_what_is_wrong_is_named_with_its_place(own, match):
    with pytest.raises(ConfigError, match=match):
        settings_of(verl_config(own), ["a:1"])


def test_validation_and_greedy_sampling():
    rollout = verl_config().actor_rollout_ref.rollout
    assert sampling_of(rollout, validate=True, greedy=False).temperature == 0.5
    assert sampling_of(rollout, validate=False, greedy=True).temperature == 0.0
    rollout.val_kwargs.do_sample = False
    assert sampling_of(rollout, validate=True, greedy=False).temperature == 0.0
    assert sampling_of(rollout, validate=False, greedy=False).temperature == 0.9
