"""Recommend an action for each failure reason of a rollout.

`docs/troubleshooting.md` has a section for each reason; a test compares them.
"""

from agent_wrapper.contract import Outcome

SCORER_FAILED = "scorer_failed"
ARTIFACT_LOST = "artifact_lost"
NOT_SERVING = "agent_not_serving"
NOT_SERVING_TEXT = "the file ended without serving: does it call `app.run()`?"
# With exit code 0 and without a result, before it served or after.
AGENT_ENDED = "agent_ended"
OF_THE_AGENT = (NOT_SERVING, AGENT_ENDED)


def outcome_without_result(reason: str) -> Outcome:
    """Return the outcome of a rollout whose session was lost for this reason."""
    return Outcome.AGENT_ERROR if reason in OF_THE_AGENT else Outcome.INFRA_ERROR


def what_to_do(reason: str) -> str:
    """Return what to do about rollouts that ended for this reason."""
    return WHAT_TO_DO.get(reason, "read the message")


def documented_at(reason: str) -> str:
    """Return where the documentation explains a reason."""
    return f"docs/troubleshooting.md#{reason if reason in WHAT_TO_DO else 'why-rollouts-fail'}"


WHAT_TO_DO = {
    "agent_exception": "read the traceback: `rollout show`",
    "agent_failure": "nothing, if that is intended",
    "command_failed": "read the end of its output in the message",
    "command_not_started": "check the command's name, and that the image has it; pass a long payload by stdin or "
    "as a file",
    "verifier_failed": "read the end of the verifier's output in the message",
    "bad_reward": "return a finite number as `reward`",
    "bad_extras": "return JSON values of limited size beside `reward`; the message names the one that is refused",
    "no_reward": "return `reward`, or name a scorer by `--scorer FILE.py:FUNCTION` or `scoring.function`: rewards.md",
    "no_model_call": "use the context's `base_url` and `api_key`",
    "status_code": "read the message; see toolkit-agents.md",
    "invocation_error": "read the message, and the agent's log",
    "model_unreachable": "the message names the address: set `gateway.public_url` to one that agents can reach, "
    "and open its port to them",
    "model_unavailable": "check that agents can reach `gateway.public_url`; read `logs/`: an engine of "
    "another version, or with other flags, may refuse calls",
    "trajectory_too_large": "raise `storage.max_result_bytes`, or rewrite the history less often",
    "trajectory_unavailable": "check that agents can reach `gateway.public_url`; read `logs/`",
    "wrapper_failed": "read the traceback: `rollout show`; report it, unless the container ran out of something",
    "terminated": "keep `runtime.max_lifetime_s` above `timeouts.agent_s`; do not deploy during a run",
    "throttled": "raise the quota, or `timeouts.collection_s`; see throttling",
    "quota_exceeded": "lower `runtime.max_sessions`, or raise the quota",
    "runtime_conflict": "check what else uses the runtime",
    "runtime_not_ready": "read the message; raise the quota of runtimes, or `timeouts.collection_s`",
    "runtime_create_failed": "read AgentCore's reason; check the task's image, that it is arm64, and `runtime.role`",
    "runtime_unavailable": "check the runtime's status and the network",
    "runtime_error": "read the message",
    "invoke_outcome_unknown": "raise `runtime.read_timeout_s` if containers start slowly",
    "invoke_rejected": 'read the message; for "not MMDSv2-enabled" see deploy.md',
    "access_denied": "attach the trainer's policy (the stack's output `TrainerPolicyArn`), and check that "
    "the credentials belong to its account",
    "credentials_expired": "log in and resume the run",
    "no_credentials": "log in; check your credential provider",
    "wrong_clock": "synchronise the clock of the trainer's machine",
    "runtime_not_found": "check `runtime.arn` and `runtime.qualifier`",
    NOT_SERVING: "call `app.run()` at the end of the agent's file; try it with `rollout doctor --agent FILE`",
    AGENT_ENDED: "call `app.run()` at the end of the agent's file, and call neither `sys.exit` nor `os._exit` in it",
    "container_error": "read the container's log; for AgentCore, check that the image is arm64",
    "container_start_timeout": "use a smaller image; import less before `app.run()`",
    "container_lost": "read the session's log: it may have run out of memory, or something may have blocked its "
    "Python process for three times `timeouts.heartbeat_s`",
    "out_of_memory": "raise `runtime.limits` or `runtime.memory_bytes`; see which tasks need it",
    "image_pull_failed": "check `runtime.image` and `runtime.image_pull_secrets`",
    "evicted": "read the message: the node was drained, or had no memory or disk left. Reserve what agents use in "
    "`runtime.requests`",
    "unschedulable": "add nodes, lower `runtime.requests`, check `runtime.node_selector`, or raise "
    "`runtime.start_timeout_s`",
    "not_a_rollout_app": "wrap it in `RolloutApp`; deploy the current image",
    "invalid_result": "read the message; use one version of wrapper and backend; "
    "check lifecycle rules and policies for `runs/`. If a container publishes under other sessions' names, set "
    "`storage.presigned`",
    SCORER_FAILED: "read the message, and `logs/scorer.log`; see rewards.md",
    ARTIFACT_LOST: "read the message; check lifecycle rules and policies for `runs/`",
    "run_failed": "read `logs/`, or the diagnosis",
    "task_blocked": "read the record that the message names",
    "agent_deadline": "read the stack in `rollout show`; raise the limit, or give its tools timeouts",
    "no_result": "read the session's log: it may have run out of memory; check that its role may write under "
    "`storage.prefix`",
    "straggler": "nothing, if that is intended: `group.straggler_factor`",
    "collection_deadline": "raise `timeouts.collection_s` or `runtime.max_sessions`",
    "store_unavailable": "read the error of S3, or of the runtime, in the log; the results may be in the bucket",
    "target_reached": "nothing",
    "group_doomed": "check what its group lost",
    "not_started": "raise `timeouts.collection_s` or `runtime.max_sessions`",
    "step_over": "nothing",
    "aborted": "nothing",
}
