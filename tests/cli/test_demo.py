"""What `rollout demo` and `rollout dev` refuse before anything starts; `e2e` and `workbench/local` run them."""

import json

from builders import refused
from rollout_backend.core.tasks import read_tasks
from rollout_backend.workbench.local.scripted import ScriptedSums
from stub_server import StubServer


def test_an_endpoint_that_cannot_serve_is_refused_before_anything_starts(rollout, tmp_path):
    def answers(**by_path: tuple[int, object]):
        def handle(request) -> tuple[int, bytes]:
            status, body = by_path.get(request.path.strip("/"), (404, "not found"))
            return status, json.dumps(body).encode()

        return handle

    model = {"model_path": str(tmp_path)}
    sampled = {"meta_info": {"output_token_logprobs": [[-0.5, 7, None]]}}
    cases = (
        ({}, "/model_info answers 404: this is no SGLang or vLLM server. Rollouts need the ids and logprobs"),
        ({"model_info": (200, [])}, "this is no SGLang or vLLM server"),
        ({"get_model_info": (200, model)}, "it is a router, or an old SGLang"),
        ({"model_info": (200, model)}, "/generate answers 404 without the logprob of a sampled token"),
        ({"model_info": (200, model), "generate": (200, {"text": "7"})}, "without the logprob of a sampled token"),
        (
            {"model_info": (200, {"model_path": "Qwen/Qwen3"}), "generate": (200, sampled)},
            "there is no folder Qwen/Qwen3, and no such model on the hub",
        ),
    )
    for paths, words in cases:
        with StubServer(answers(**paths)) as server:
            code, output = rollout("demo", "--endpoint", f"{server.url}/v1/")
        assert (code, words in output) == (2, True), output
    refused(rollout("demo", "--endpoint", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9/model_info")


def test_a_script_and_an_endpoint_exclude_each_other(rollout):
    refused(rollout("demo", "--scripted", "--endpoint", "http://127.0.0.1:9"), "leave out --scripted or --endpoint")


def test_the_script_answers_the_demos_tasks_so_that_most_groups_have_spread(repository):
    reply = ScriptedSums()
    tasks = read_tasks(repository / "rollout_backend" / "workbench" / "local" / "demo" / "tasks.jsonl")
    questions = [(str(task.payload["question"]), f"It is {task.payload['answer']}.") for task in tasks]
    right = [[reply(question) == answer for _ in range(4)] for question, answer in questions]
    assert all(any(group) for group in right)
    with_spread = sum(not all(group) for group in right)
    assert len(right) / 2 < with_spread < len(right)
    assert reply("Who are you?") == "This reply is scripted."


def test_a_reply_that_is_named_is_the_same_each_time():
    """`rollout dev` names reply 0 unless --reply names another one, so a reward changes only with the agent."""
    question = "What is 2 + 3?"
    drawn = ScriptedSums()
    said = [drawn(question) for _ in range(6)]
    assert [{ScriptedSums(number)(question) for _ in range(3)} for number in range(6)] == [{each} for each in said]
    assert len({*said}) == 2


def test_a_demo_says_which_tasks_its_script_can_answer(rollout, repository, tmp_path):
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"payload": {"question": "What is 2 + 3?"}}\n{"payload": {"question": "Who are you?"}}\n')
    agent = repository / "examples" / "arithmetic" / "agent.py"
    # The setting ends the demo after the note.
    outcome = rollout("demo", "--scripted", "--agent", agent, "--tasks", tasks, "-o", "group.none=1")
    refused(outcome, 'the script can answer 1 of 2 tasks: those that ask "What is A + B?". The others get a fixed')
    outcome = rollout("demo", "--scripted", "-o", "group.none=1")
    assert "the script can answer" not in outcome[1]


def test_input_that_cannot_be_used_is_refused(rollout, repository, tmp_path):
    agent = repository / "examples" / "arithmetic" / "agent.py"
    cases = (
        ((tmp_path / "none.py",), "there is no agent at"),
        ((agent, "--task", "none"), "tasks.jsonl has no task 'none'; its first one is 'sum-6-5'"),
        ((agent, "--task", "sum-6-5", "--limit", "2"), "leave out --task or --limit"),
        ((agent, "--engine", "--endpoint", "http://127.0.0.1:9"), "leave out --engine or --endpoint"),
        ((agent, "--endpoint", "http://127.0.0.1:9"), "no server answers at http://127.0.0.1:9/model_info"),
        ((agent, "-o", "model.path=/none"), "/none is not a folder on this machine"),
    )
    for arguments, words in cases:
        refused(rollout("dev", *arguments), words)
