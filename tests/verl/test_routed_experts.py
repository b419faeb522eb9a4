"""Routed experts, from the engine to a forward pass that replays them with verl's own code.

The engine samples from a tiny random Qwen3-MoE. Its tokens pass the experts that a seed selects, or the model's own.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter
from verl import DataProto
from verl.trainer.ppo.metric_utils import compute_rollout_moe_load_balance_metrics
from verl.utils.tensordict_utils import list_of_dict_to_tensordict
from verl.utils.veomni.router_replay import VeOmniRouterReplay
from verl.workers.utils.padding import left_right_2_no_padding

from agent_wrapper.contract import Rollout
from gateway_fixtures import make_gateway
from rollout_backend.config import ModelConfig
from rollout_backend.core.rows import Row, rows_of
from rollout_backend.core.seal import Sealer
from rollout_backend.model.serving.external_engine import check_options
from rollout_backend.verl.row_formats import legacy_batch, v1_fields
from rollout_backend.workbench.local.scripted import BYTE_MODEL, Aborted, Routing, ScriptedEngine
from rollouts import make_rollout
from tests.emulators.scripted_experts import seeded_routing

PROMPT, RESPONSE = 16, 256  # the first prompt is longer
EQUAL, ENGINE_EQUAL, DIFFERENT = 1e-5, 1e-4, 1e-2
SEAL_SECRET = "seal-secret-" * 4


class Model:
    """A tiny Qwen3-MoE whose routers ask verl's replay controller."""

    def __init__(self, folder: Path) -> None:
        shutil.copytree(BYTE_MODEL, folder)
        config = Qwen3MoeConfig(
            vocab_size=259,
            hidden_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=32,
            moe_intermediate_size=32,
            num_experts=8,
            num_experts_per_tok=2,
            max_position_embeddings=2048,
            norm_topk_prob=True,
            initializer_range=0.3,
        )
        config.save_pretrained(folder)
        self.settings = ModelConfig(path=folder, name="scripted", renderer="chatml", routed_experts=True)
        self.shape = self.settings.expert_shape
        self.replay = VeOmniRouterReplay()
        torch.manual_seed(0)
        self._model = Qwen3MoeForCausalLM(config).eval()
        for router in self._model.modules():
            if isinstance(router, Qwen3MoeTopKRouter):
                torch.nn.init.normal_(router.weight, std=0.3)
                router.forward = self._route(router)
        self._model.save_pretrained(folder)

    def _route(self, router: Qwen3MoeTopKRouter) -> Callable[[torch.Tensor], Any]:
        def forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = torch.nn.functional.linear(hidden, router.weight)
            probabilities = logits.softmax(-1)
            chosen = self.replay.on_router_forward(router, probabilities, probabilities.topk(router.top_k).indices)
            weights = probabilities.gather(-1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        return forward

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], experts: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logprob of each token but the first; replay `experts`, [tokens, layers, topk]."""
        if experts is not None:
            self.replay.begin_replay()
            self.replay.begin_microbatch(list(experts.to(torch.int64).unbind(1)))
        tokens = torch.tensor([list(ids)])
        logits = self._model(tokens).logits[0].log_softmax(-1)
        self.replay.clear()
        return logits[:-1].gather(-1, tokens[0, 1:, None])[:, 0]

    @torch.no_grad()
    def own_routing(self, ids: Sequence[int], version: str) -> NDArray[np.int32]:
        self.replay.begin_record()
        self._model(torch.tensor([list(ids)]))
        recorded = self.replay.take_recorded()
        self.replay.clear()
        return recorded.numpy().astype(np.int32)


class ModelEngine(ScriptedEngine):
    """A scripted engine whose logprobs are those of a model that routes as the engine does."""

    def __init__(self, model: Model, routing: Routing, replies: Any) -> None:
        super().__init__(replies, model.settings.path, routing=routing)
        self._model = model

    def _completion(self, text: str, body: dict[str, Any]) -> dict[str, Any]:
        whole = super()._completion(text, body)
        ids, prompt = whole["output_ids"], body["input_ids"]
        assert self.routing is not None
        experts = torch.from_numpy(self.routing([*prompt, *ids], self.weight_version))
        logprobs = self._model.logprobs([*prompt, *ids], experts)[len(prompt) - 1 :].tolist()
        whole["meta_info"]["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(logprobs, ids, strict=True)
        ]
        return whole


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="module", params=["seed", "model"])
def rollout(request: pytest.FixtureRequest, model: Model, byte_bundle: Any) -> Rollout:
    """A rollout of three calls: aborted and resumed, ended by a stop string, and a branch."""
    said = iter([Aborted("It is "), "seven.", "No. Yes.", "(its routing)", "Another"])
    routing = seeded_routing(model.shape) if request.param == "seed" else model.own_routing
    with (
        ModelEngine(model, routing, lambda _: next(said)) as engine,
        make_gateway(engine.url, model.settings, byte_bundle, engine=engine, seal_secret=SEAL_SECRET) as gateway,
    ):
        first = [{"role": "user", "content": "What is 3 + 4?"}, {"role": "assistant", "content": "It is seven."}]
        gateway.post({"model": "scripted", "messages": first[:1]}).raise_for_status()
        for more in ({"stop": [" Yes"]}, {}):
            messages = [*first, {"role": "user", "content": f"Sure? {len(more)}"}]
            gateway.post({"model": "scripted", "messages": messages, **more}).raise_for_status()
        trajectory = gateway.trajectory()
    ids = {"run_id": "run", "step": 0, "session_id": "s1", "model": trajectory.model, "seal": trajectory.seal}
    made = make_rollout("r", task_id="r", reward=1.0, segments=trajectory.segments).model_copy(update=ids)
    Sealer(SEAL_SECRET).check(made)
    return Rollout.decode(made.encode())


def rows(rollout: Rollout, model: Model) -> list[Row]:
    return [*rows_of(rollout, PROMPT, RESPONSE, experts=model.shape)]


def worst(model: Model, fields: Any, experts: torch.Tensor | None) -> float:
    """Return the largest difference between the logprobs of the engine and of a forward pass."""
    mask = fields["response_mask"].bool()
    found = model.logprobs(fields["input_ids"].tolist(), experts)[-len(mask) :]
    return float((found - fields["rollout_log_probs"])[mask].abs().max())


def test_a_forward_pass_that_replays_the_rows_has_the_sampled_logprobs(rollout, model, request):
    data = list_of_dict_to_tensordict([v1_fields(row, {}) for row in rows(rollout, model)])
    assert [len(segment.turns) for segment in rollout.segments] == [2, 1]
    is_seeded = "seed" in request.node.callspec.id
    for i in range(len(data)):
        fields = {
            name: data[name][i] for name in ("input_ids", "response_mask", "rollout_log_probs", "routed_experts")
        }
        experts = fields["routed_experts"]
        assert experts.dtype == torch.int16
        assert experts.shape == (len(fields["input_ids"]), 3, 2)
        assert not experts[-1].any(), "the last token was sampled and not processed"
        assert worst(model, fields, experts) < EQUAL
        shuffled = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(0))]
        assert worst(model, fields, shuffled) > DIFFERENT
        assert (worst(model, fields, None) > DIFFERENT) is is_seeded


def test_the_legacy_trainer_gets_the_same_routing(rollout, model):
    made = rows_of(rollout, PROMPT, RESPONSE, experts=model.shape)
    batch = legacy_batch([made, None], PROMPT, RESPONSE, 0, experts=model.shape)
    routed = batch.tensors["routed_experts"]
    assert (routed.shape, routed.dtype) == ((2, PROMPT + RESPONSE, 3, 2), torch.int16)
    data = DataProto(batch=batch.tensors, non_tensor_batch={}, meta_info={}).to_tensordict()
    nested = left_right_2_no_padding(data)["routed_experts"]
    chosen = max(reversed(made.rows), key=lambda row: row.trained_tokens)
    assert np.array_equal(nested[0].numpy(), chosen.routed_experts)
    assert not nested[1].any()
    metrics = compute_rollout_moe_load_balance_metrics(routed, batch.tensors["response_mask"], 8)
    assert metrics["rollout/moe/max_vio/max"] > 0


def test_a_changed_routing_breaks_the_seal(rollout):
    [first, *others] = rollout.segments
    ids = bytes([first.routed_experts.ids[0] ^ 1]) + first.routed_experts.ids[1:]
    experts = first.routed_experts.model_copy(update={"ids": ids})
    for changed in (experts, None):
        segment = first.model_copy(update={"routed_experts": changed})
        with pytest.raises(ValueError, match="these are not what was sampled"):
            Sealer(SEAL_SECRET).check(rollout.model_copy(update={"segments": (segment, *others)}))


def test_a_rollout_without_its_routing_is_left_out(rollout, model):
    [first, *others] = rollout.segments
    bare = first.model_copy(update={"routed_experts": None})
    left_out = rows_of(
        rollout.model_copy(update={"segments": (bare, *others)}), PROMPT, RESPONSE, experts=model.shape
    )
    assert (len(left_out), left_out.masked) == (0, "routed_experts")
    of_another_model = rows_of(rollout, PROMPT, RESPONSE, experts=model.shape._replace(layers=4))
    assert of_another_model.masked == "routed_experts"
    assert all(row.routed_experts is None for row in rows_of(rollout, PROMPT, RESPONSE))


def test_a_row_that_is_cut_has_the_routing_of_its_tokens(rollout, model):
    for row in rows_of(rollout, PROMPT, 20, experts=model.shape):
        assert len(row.routed_experts) == len(row.tokens)
        assert row.routed_experts.reshape(len(row.tokens), -1).any(axis=1).all()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(300)  # the engine starts
def test_a_real_engine_returns_the_routing_of_its_logprobs(model, run_engine, byte_bundle):
    """Calls: plain, streamed, ended by a stop string, aborted and resumed. Three of them branch.

    The server has no tokenizer, like verl's.
    """
    without_tokenizer = ("--skip-tokenizer-init",)
    with (
        run_engine(model.settings, 170.0, max_total_tokens=4096, extra_args=without_tokenizer) as url,
        make_gateway(url, model.settings, byte_bundle) as gateway,
    ):

        def ask(*messages: dict[str, str], **more: Any) -> str:
            body = {"model": "scripted", "messages": messages, "max_tokens": 40, **more}
            response = gateway.post(body, key=gateway.key(temperature=0.0)).raise_for_status()
            return "" if more.get("stream") else response.json()["choices"][0]["message"]["content"]

        asyncio.run(check_options(url, records_experts=True, seeded=False))
        question = {"role": "user", "content": "What is 3 + 4?"}
        said = [question, {"role": "assistant", "content": ask(question)}, question]
        text = ask(*said)
        ask(*said, stream=True)
        stop = next(character for character in text[5:] if character.isascii() and character.isprintable())
        assert len(ask(*said, stop=[stop])) < len(text)
        body = {"model": "scripted", "messages": [question], "max_tokens": 400, "stream": True}
        headers = gateway.headers(temperature=0.0)
        with httpx.stream(
            "POST", f"{gateway.url}/v1/chat/completions", json=body, headers=headers, timeout=120
        ) as response:
            lines = response.iter_lines()
            next(lines)
            httpx.post(f"{url}/abort_request", json={"abort_all": True}, timeout=120).raise_for_status()
            assert [line for line in lines if line][-1] == "data: [DONE]"
        segments = gateway.trajectory().segments
    assert [len(segment.turns) for segment in segments] == [2, 1, 1, 1]
    made = [*rows_of(make_rollout("r", task_id="r", segments=segments), PROMPT, RESPONSE, experts=model.shape)]
    assert len(made) == len(segments)
    for fields in (v1_fields(row, {}) for row in made):
        experts = fields["routed_experts"]
        assert worst(model, fields, experts) < ENGINE_EQUAL
        shuffled = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(0))]
        assert worst(model, fields, shuffled) > DIFFERENT
