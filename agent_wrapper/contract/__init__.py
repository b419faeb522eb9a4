"""The contract between the training side and an agent's container: the objects that both sides exchange.

Invariants:

- A `Rollout` is self-contained: it has the sampled tokens, the weights that sampled them, the reward, the outcome,
  and the reason of a failure. No value is made up: a logprob that the engine did not return is NaN (JSON: null).
- Only a completed rollout, or an agent error that the agent itself scored, carries a reward.
- A completed rollout holds sampled tokens.
- A result's key is derived from its rollout id (`result_key`), so the first write wins. An attempt that failed
  because of the infrastructure has no result: it writes a failure marker under its own key (`failure_marker_key`),
  which does not block the next attempt.
- The gateway's seal is copied from the trajectory into the rollout. The container does not read it.
- An image is stored once in a rollout, under the SHA-256 of its bytes; segments refer to it by that name. Tokens and
  messages that several segments share are stored once, too (`shared_prefixes`).
- Malformed input raises `ContractError`, which names the field.

Two encodings of the same fields are accepted (`codec`): the compact form that `Rollout.encode` writes (msgpack in one
zstd frame, arrays as little-endian raw bytes), and plain JSON, for agents in any language.
"""

from agent_wrapper.contract.codec import ContractError, readable
from agent_wrapper.contract.keys import (
    MAX_STEP,
    ResultName,
    agents_prefix,
    artifacts_key,
    blocklist_prefix,
    failure_marker_key,
    lease_key,
    lineage_key,
    manifest_key,
    parse_result_key,
    probe_key,
    quarantine_prefix,
    result_key,
    score_key,
    step_prefix,
)
from agent_wrapper.contract.messages import (
    PAYLOAD_VARIABLE,
    PUT_HEADERS,
    REQUEST_FIELD,
    Announcement,
    ModelEndpoint,
    ResultTarget,
    ResultUrls,
    RolloutRequest,
    Sampling,
    put_headers,
)
from agent_wrapper.contract.objects import (
    MAX_ARTIFACT_BYTES,
    MAX_ARTIFACTS,
    MAX_PACKED_ARTIFACT_BYTES,
    NO_REWARD,
    Artifact,
    ContractObject,
    Failure,
    Identifier,
    Images,
    ImageSpan,
    Outcome,
    Rollout,
    RoutedExperts,
    ScoredBy,
    Segment,
    Trajectory,
    Turn,
    VersionSpan,
    check_rewards,
    pack_artifacts,
    unpack_artifacts,
)
from agent_wrapper.contract.shared_prefixes import CheckedMessages

__all__ = [
    "MAX_ARTIFACTS",
    "MAX_ARTIFACT_BYTES",
    "MAX_PACKED_ARTIFACT_BYTES",
    "MAX_STEP",
    "NO_REWARD",
    "PAYLOAD_VARIABLE",
    "PUT_HEADERS",
    "REQUEST_FIELD",
    "Announcement",
    "Artifact",
    "CheckedMessages",
    "ContractError",
    "ContractObject",
    "Failure",
    "Identifier",
    "ImageSpan",
    "Images",
    "ModelEndpoint",
    "Outcome",
    "ResultName",
    "ResultTarget",
    "ResultUrls",
    "Rollout",
    "RolloutRequest",
    "RoutedExperts",
    "Sampling",
    "ScoredBy",
    "Segment",
    "Trajectory",
    "Turn",
    "VersionSpan",
    "agents_prefix",
    "artifacts_key",
    "blocklist_prefix",
    "check_rewards",
    "failure_marker_key",
    "lease_key",
    "lineage_key",
    "manifest_key",
    "pack_artifacts",
    "parse_result_key",
    "probe_key",
    "put_headers",
    "quarantine_prefix",
    "readable",
    "result_key",
    "score_key",
    "step_prefix",
    "unpack_artifacts",
]
