"""Explain the words of this project that reports and commands print."""

WORDS = {
    "reconciles": "each planned rollout ended in exactly one class: planned = completed + agent_error + "
    "infra_error + timed_out + cancelled",
    "spread": "the rewards of a group differ. GRPO learns nothing from a group whose rewards are all equal",
    "seal": "the gateway's signature over what it sampled. A result without it is not trained",
    "segment": "a sequence of tokens that becomes one row for training, counted from 0. A call that does not "
    "continue the conversation so far starts another one",
    "weights": "the version of the model that sampled the tokens. 0 is the model before its first update",
    "cache breaks": "calls for which the engine had to read a conversation again that it had read before",
    "group_doomed": "the rollout was cancelled, because its group had lost too many others to be trained",
}
