"""Agent frameworks and command-line agents that run unmodified against the gateway, and the rows of a conversation.

`docs/make_clients.py` makes a page of this table, and test_harnesses.py runs its entries. `pins/` has the versions,
which `python tests/support/harnesses.py codex.json` renews.
"""

import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import check_output, run
from tempfile import TemporaryDirectory

from filelock import FileLock
from uv import find_uv_bin

from rollout_backend.model.serving.install import cache_dir
from rollout_backend.workbench.local.scripted import ToolCall

FOLDER = Path(__file__).parents[1] / "model" / "dialects" / "harnesses"
ONE_ROW = ("first_call",)
# Python 3.11 is too old for these.
PYTHON = dict.fromkeys(
    ("agency-swarm.txt", "fast-agent.txt", "mistral-vibe.txt", "openhands.txt", "terminus.txt"), "3.12"
)
SERVICES = {"aws.txt": "awscli moto[all,server]", "ministack.txt": "ministack"}


def said(name: str, **arguments: object) -> str:
    return str(ToolCall(name, arguments))


SUMS = (
    f"I add first.\n{said('add', a=2, b=3)}",
    said("add", a=5, b=4),
    "It is 9.",
    said("add", a=9, b=1),
    "It is 10.",
)


def react(tool: str, a: int = 0, b: int = 0) -> str:
    """Return a step of DSPy's ReAct."""
    given = json.dumps({"a": a, "b": b} if b else {})
    parts = {"next_thought": "I add.", "next_tool_name": tool, "next_tool_args": given, "completed": ""}
    return "\n\n".join(f"[[ ## {name} ## ]]\n{text}" for name, text in parts.items())


def typed(command: str = "", *, done: bool = False) -> str:
    """Return a step of Terminus-2, which types a command."""
    commands = [{"keystrokes": f"{command}\n", "duration": 0.5}] if command else []
    return json.dumps({"analysis": "I see.", "plan": "I add.", "commands": commands, "task_complete": done})


OLD, NEW = "return n + n + 1", "return n + n"
TASK = "The function double in double.py returns the wrong number. Fix it."


@dataclass(frozen=True)
class Harness:
    """A client, and what it does with a conversation.

    `command` runs in bash with `env`, after `files` were written into its home. All three can name BASE_URL, API_KEY,
    CONTEXT_LENGTH, MODEL and TASK.
    """

    name: str
    install: str  # packages; the page names the first one's version
    pins: str  # a file of pins/ with the exact versions of these and all that they need
    command: str
    apis: Sequence[str] = ("chat",)
    replies: Sequence[str] = SUMS
    reasons: Sequence[str] = ONE_ROW  # why each row was opened
    env: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    stop: str = ""  # the stop string that ends its replies
    errors: Sequence[str] = ()  # the kinds of errors that the gateway answers to its probes
    note: str = ""  # for the page

    @property
    def version(self) -> str:
        pins, package = (FOLDER / "pins" / self.pins).read_text(), re.split(r"\[| ", self.install)[0]
        if self.pins.endswith(".json"):
            return str(json.loads(pins)["packages"][f"node_modules/{package}"]["version"])
        return str(re.findall(rf"^{package}==(\S+)", pins, re.MULTILINE)[0])

    @property
    def script(self) -> Path | None:
        """The file in scripts/ that the command runs; None: the command is the agent's own."""
        runner, file, *_ = self.command.split()
        return FOLDER / "scripts" / file if runner in ("python", "node") else None


FIX = (
    f"I look first.\n{said('read_file', file_path='REPOSITORY/double.py')}",
    said("edit", file_path="REPOSITORY/double.py", old_string=OLD, new_string=NEW),
    said("run_shell_command", command="python -c 'import double; print(double.double(4))'", is_background=False),
    "It is fixed.",
)


def renamed(replies: Sequence[str], **names: str) -> tuple[str, ...]:
    """Return the replies with other names of tools and arguments."""
    return tuple(
        re.sub(r'(?<=")\w+(?=": )|(?<="name": ")\w+', lambda word: names.get(word[0], word[0]), text)
        for text in replies
    )


ALL = ("chat", "responses", "messages")
COPILOT = Harness(
    name="Copilot CLI",
    install="@github/copilot",
    pins="copilot.json",
    command='copilot -p "TASK" --allow-all-tools --no-custom-instructions',
    apis=("responses",),
    replies=(
        f"I look first.\n{said('bash', command='cat double.py', description='look')}",
        said("bash", command="sed -i 's/ + 1//' double.py", description="fix"),
        "It is fixed.",
    ),
    env={
        "COPILOT_PROVIDER_TYPE": "openai",
        "COPILOT_PROVIDER_WIRE_API": "responses",
        "COPILOT_PROVIDER_BASE_URL": "BASE_URL",
        "COPILOT_PROVIDER_API_KEY": "API_KEY",
        "COPILOT_MODEL": "MODEL",
        "COPILOT_OFFLINE": "true",
    },
)
HARNESSES = (
    Harness(
        name="Claude Code",
        install="@anthropic-ai/claude-code",
        pins="claude-code.json",
        command='claude -p "TASK" --allowedTools Read,Edit,Bash --output-format json',
        apis=("messages",),
        replies=renamed(FIX, read_file="Read", edit="Edit", run_shell_command="Bash"),
        env={
            "ANTHROPIC_BASE_URL": "BASE_URL",
            "ANTHROPIC_API_KEY": "API_KEY",
            "ANTHROPIC_MODEL": "MODEL",
            "ANTHROPIC_SMALL_FAST_MODEL": "MODEL",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": "MODEL",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "ENABLE_TOOL_SEARCH": "false",
        },
        note="""\
The first prompt has 50,000 characters of system prompt and tools: set a `context_length` of at least 32,000 tokens.
Claude Code fills in the defaults of a tool's schema when it returns a call; the gateway recognises the call. It also
adds an accounting line to its system prompt that changes with each call; the gateway removes it. A sub-agent (the
tool `Agent`) is a separate conversation, and therefore a separate row. A compaction opens a new row too. If the
model does not take an image or a PDF, Claude Code leaves it out and tells the model so.""",
    ),
    Harness(
        name="Codex",
        install="@openai/codex",
        pins="codex.json",
        command='codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox "TASK"',
        apis=("responses",),
        replies=(
            f"I look first.\n{said('exec_command', cmd='cat double.py')}",
            said("exec_command", cmd="sed -i 's/ + 1//' double.py"),
            "It is fixed.",
        ),
        env={"OPENAI_API_KEY": "API_KEY"},
        files={
            ".codex/config.toml": """\
model = "MODEL"
model_provider = "rollout"
model_context_window = CONTEXT_LENGTH
web_search = "disabled"

[model_providers.rollout]
name = "rollout"
base_url = "BASE_URL"
env_key = "OPENAI_API_KEY"
wire_api = "responses"
request_max_retries = 10
stream_max_retries = 10

[agents]
enabled = false
"""
        },
        note="""\
Ten retries outlast the restart of an engine or a gateway. Codex compacts its history before it reaches
`model_context_window`, and the compaction opens a new row. Set the model's `context_length`, or Codex ends with an
error once it exceeds that. If the model takes no images, set `features.view_image = false` too, or Codex ends with
an error once the model looks at one. The container is the sandbox: do not use the flag that bypasses Codex's sandbox
anywhere else.""",
    ),
    Harness(
        name="opencode",
        install="opencode-ai",
        pins="opencode.json",
        command='opencode run "TASK"',
        replies=renamed(
            FIX,
            read_file="read",
            file_path="filePath",
            old_string="oldString",
            new_string="newString",
            run_shell_command="bash",
        ),
        env={"OPENAI_BASE_URL": "BASE_URL", "OPENAI_API_KEY": "API_KEY", "OPENCODE_DISABLE_MODELS_FETCH": "1"},
        files={
            ".config/opencode/opencode.json": """\
{
  "model": "rollout/MODEL",
  "small_model": "rollout/MODEL",
  "autoupdate": false,
  "share": "disabled",
  "permission": "allow",
  "agent": {"title": {"disable": true}},
  "provider": {
    "rollout": {
      "npm": "@ai-sdk/openai-compatible",
      "options": {"baseURL": "{env:OPENAI_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
      "models": {"MODEL": {"name": "MODEL", "tool_call": true, "limit": {"context": CONTEXT_LENGTH, "output": 4096}}}
    }
  }
}
"""
        },
        note="""\
In an image, save the file in any folder and name it in `OPENCODE_CONFIG`: [a command's
home](commands.md#let-it-find-the-model) is empty. If you enable titles, the title of each conversation is a separate
row that is trained like the others; [`training.leave_out`](settings.md) leaves it out.""",
    ),
    Harness(
        name="Qwen Code",
        install="@qwen-code/qwen-code",
        pins="qwen-code.json",
        command='qwen -p "TASK" --yolo --auth-type openai',
        replies=FIX,
        env={"OPENAI_BASE_URL": "BASE_URL", "OPENAI_API_KEY": "API_KEY", "OPENAI_MODEL": "MODEL"},
    ),
    Harness(
        name="mini-swe-agent",
        install="mini-swe-agent",
        pins="mini-swe-agent.txt",
        command='mini -m openai/MODEL -t "TASK" --yolo --exit-immediately --cost-limit 0 -o notes.json',
        replies=(
            f"I look first.\n{said('bash', command='cat double.py && git log --oneline')}",
            said("bash", command="sed -i 's/ + 1//' double.py"),
            said("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ),
        env={
            "OPENAI_BASE_URL": "BASE_URL",
            "OPENAI_API_KEY": "API_KEY",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        },
        note="""\
You can also use `anthropic/MODEL` with `ANTHROPIC_BASE_URL` and `ANTHROPIC_API_KEY`. The agent omits a reply without
a usable call from the history, so the next call opens a new row. Limit the steps with `-c mini.yaml -c
agent.step_limit=50`, or a weak model continues until the rollout's deadline.""",
    ),
    Harness(
        name="aider",
        install="aider-chat",
        pins="aider.txt",
        command="""\
aider --model openai/MODEL --message "TASK" --edit-format whole --no-auto-commits --yes-always --no-check-update \\
  --no-show-model-warnings --analytics-disable double.py""",
        replies=(f"I fix it.\n\ndouble.py\n```python\ndef double(n):\n    {NEW}\n```",),
        env={"OPENAI_API_BASE": "BASE_URL", "OPENAI_API_KEY": "API_KEY", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        note="""\
Without `--no-auto-commits`, aider asks the model for a commit message, which is a separate row.""",
    ),
    Harness(
        name="Cline",
        install="cline",
        pins="cline.json",
        command="""\
cline auth openai-compatible --apikey $OPENAI_API_KEY --baseurl $OPENAI_BASE_URL --modelid MODEL
cline --provider openai-compatible "TASK\"""",
        replies=(
            f"I look first.\n{said('read_files', files=[{'path': 'REPOSITORY/double.py'}])}",
            said("run_commands", commands=["sed -i 's/ + 1//' double.py"]),
            "It is fixed.",
        ),
        env={"OPENAI_BASE_URL": "BASE_URL", "OPENAI_API_KEY": "API_KEY"},
    ),
    COPILOT,
    replace(COPILOT, apis=("chat",), env={**COPILOT.env, "COPILOT_PROVIDER_WIRE_API": "completions"}),
    Harness(
        "OpenHands SDK",
        "openhands-sdk",
        "openhands.txt",
        "python openhands_agent.py",
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        note="It needs Python 3.12.",
    ),
    Harness(
        "LangChain",
        "langchain langchain-openai langchain-anthropic",
        "langchain.txt",
        "python langchain_agents.py LangChain",
        ALL,
    ),
    Harness(
        "LangGraph",
        "langgraph langchain-openai langchain-anthropic",
        "langchain.txt",
        "python langchain_agents.py LangGraph",
        ALL,
        note="""Its `create_react_agent` and graphs of your own take the same model.""",
    ),
    Harness(
        "deepagents",
        "deepagents langchain-openai langchain-anthropic",
        "langchain.txt",
        "python langchain_agents.py deepagents",
        ALL,
    ),
    Harness(
        "LangChain.js",
        "langchain @langchain/core @langchain/openai zod",
        "langchain-js.json",
        "node langchain.mjs",
        ("chat", "responses"),
    ),
    Harness(
        "OpenAI Agents SDK", "openai-agents", "openai-agents.txt", "python openai_agents.py", ("chat", "responses")
    ),
    Harness(
        "OpenAI Agents JS",
        "@openai/agents openai zod",
        "openai-agents-js.json",
        "node openai_agents.mjs",
        ("chat", "responses"),
    ),
    Harness(
        "LangGraph.js",
        "@langchain/langgraph @langchain/anthropic @langchain/core @langchain/openai zod",
        "langgraph-js.json",
        "node langgraph.mjs",
        ("chat", "messages"),
    ),
    Harness("Agno", "agno openai", "agno.txt", "python agno_agent.py"),
    Harness("AG2", "ag2[anthropic,openai]", "ag2.txt", "python ag2_agent.py", ALL),
    Harness(
        "CAMEL",
        "camel-ai mcp<2",
        "camel.txt",
        "python camel_agent.py",
        reasons=("first_call", "history_rewritten"),
        note="""\
CAMEL sorts its history by time stamps. After two calls in a row, the answer came before the second call, which opens
a new row. By default it downloads a vocabulary of tiktoken to count tokens, which fails in a container without the
internet: give it a `token_counter`. Its version 0.2.90 needs `mcp<2`.""",
    ),
    Harness(
        "Mastra",
        "@mastra/core @ai-sdk/openai-compatible zod",
        "mastra.json",
        "node mastra.mjs",
        replies=(*SUMS[:2], "It is 9, and then 10."),
        reasons=("first_call", "history_rewritten"),
        note="""\
The calls of one `generate` are one row. Mastra merges them into one message when the next `generate` gets them as its
history, which opens a new row.""",
    ),
    Harness(
        "Claude Agent SDK",
        "claude-agent-sdk",
        "claude-agent-sdk.txt",
        "python claude_agent.py",
        ("messages",),
        replies=renamed(SUMS, add="mcp__sums__add"),
        note="The package contains Claude Code, whose [section](#claude-code) applies to it too.",
    ),
    Harness(
        "pydantic-ai",
        "pydantic-ai-slim[anthropic,openai]",
        "pydantic-ai.txt",
        "python pydantic_ai_agent.py",
        ALL,
        note="""\
pydantic-ai omits an empty reply from the history and asks again, which opens a new row (`branched`). With an
`output_type` other than `str`, the answer is a forced tool call, which is not trained.""",
    ),
    Harness(
        "strands-agents",
        "strands-agents[anthropic,openai]",
        "strands.txt",
        "python strands_agent.py",
        ("chat", "messages"),
        note="""\
The default conversation manager drops old messages, and the client already retries. A reply that is cut raises
`MaxTokensReachedException`, and a full context raises `ContextWindowOverflowException`: [the
example](../examples/tool_agent/agent.py) scores both.""",
    ),
    Harness(
        "smolagents",
        "smolagents[openai]",
        "smolagents.txt",
        "python smolagents_code.py",
        stop="</code>",
        replies=(
            "Thought: I add.\n<code>\nprint(add(2, 3))\n</code>",
            "Thought: I add again.\n<code>\nfinal_answer(add(5, 4))\n</code>",
            "\nThought: Once more.\n<code>\nfinal_answer(add(9, 1))\n</code>\n",
        ),
        note="""\
`ToolCallingAgent` forces a tool call in each step, which is trained only with
[`gateway.forced_tools: as_auto`](settings.md).""",
    ),
    Harness("AutoGen", "autogen-agentchat autogen-ext[openai]", "autogen.txt", "python autogen.py"),
    Harness(
        "Semantic Kernel",
        "semantic-kernel",
        "semantic-kernel.txt",
        "python semantic_kernel_agent.py",
        reasons=("first_call", "history_rewritten"),
        note="It drops the text of a reply that also calls a tool, and the next call opens a new row.",
    ),
    Harness(
        "agent-framework",
        "agent-framework-core agent-framework-openai",
        "agent-framework.txt",
        "python agent_framework_agent.py",
        ("chat", "responses"),
        note="Without `store: False`, it sends `previous_response_id` to the responses API, which is answered 400.",
    ),
    Harness("google-adk", "google-adk litellm", "google-adk.txt", "python adk.py"),
    Harness(
        "CrewAI",
        "crewai[litellm]",
        "crewai.txt",
        "python crew.py",
        replies=(*SUMS[:2], "It is 9, then 10."),
        reasons=("first_call", "history_rewritten"),
        env={"CREWAI_DISABLE_TELEMETRY": "true", "CREWAI_TRACING_ENABLED": "false", "OTEL_SDK_DISABLED": "true"},
        note="It drops the text of a reply that also calls a tool, and the next call opens a new row.",
    ),
    Harness(
        "LiteLLM",
        "litellm",
        "litellm.txt",
        "python litellm_loop.py",
        ("chat", "messages"),
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},  # otherwise it fetches its prices at each start
    ),
    Harness(
        "Vercel AI SDK",
        "ai @ai-sdk/openai @ai-sdk/openai-compatible @ai-sdk/anthropic zod",
        "ai-sdk.json",
        "node ai_sdk.mjs",
        ALL,
        note="Without `store: false`, it refers to stored items in the responses API, which is answered 400.",
    ),
    Harness("Haystack", "haystack-ai", "haystack.txt", "python haystack_agent.py", ("chat", "responses")),
    Harness(
        "LlamaIndex",
        "llama-index-core llama-index-llms-openai-like",
        "llama-index.txt",
        "python llama_index_agent.py",
    ),
    Harness(
        "Inspect",
        "inspect-ai openai",
        "inspect-ai.txt",
        "python inspect_agent.py",
        replies=(*SUMS[:2], said("submit", answer="9 and 10")),
    ),
    Harness(
        "DSPy",
        "dspy",
        "dspy.txt",
        "python dspy_react.py",
        replies=(
            *(react(*each) for each in (("add", 2, 3), ("add", 5, 4), ("add", 9, 1))),
            react("finish"),
            "[[ ## reasoning ## ]]\nI added.\n\n[[ ## answer ## ]]\n10\n\n[[ ## completed ## ]]",
        ),
        reasons=("first_call", *["new_conversation"] * 4),
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        note="""\
`ReAct` writes its whole trajectory into one user message, which changes with each call. Each call is therefore a
separate row, and so is the final answer. Without `cache=False`, DSPy answers a repeated prompt from its cache.""",
    ),
    Harness(
        "instructor",
        "instructor",
        "instructor.txt",
        "python instructor_loop.py",
        replies=tuple(f'```json\n{{"total": {each}}}\n```' for each in ('"ten"', "10")),
        reasons=("first_call", "new_conversation"),
        note="""\
The default mode forces a tool call, which is not trained; `Mode.MD_JSON` lets the model answer freely. instructor
adds a schema and an instruction to the messages of each `create`. Retries after a failed validation continue the row.
The next `create` sends your own messages, without that instruction and the failed reply, and opens a new row.""",
    ),
    Harness("llm", "llm", "llm.txt", "python llm_loop.py"),
    Harness(
        "AgentScope",
        "agentscope",
        "agentscope.txt",
        "python agentscope_agent.py",
        ("chat", "responses"),
        note="""\
By default, a person must confirm each call of a function: give `FunctionTool` a `permission` that allows calls.""",
    ),
    Harness(
        "gptme",
        "gptme",
        "gptme.txt",
        'gptme --non-interactive --name task --model local/MODEL --tool-format tool "TASK"',
        replies=(
            f"I look first.\n{said('shell', command='cat double.py')}",
            said("shell", command="sed -i 's/ + 1//' double.py"),
            said("complete"),
        ),
        env={"OPENAI_BASE_URL": "BASE_URL", "OPENAI_API_KEY": "API_KEY"},
        files={".local/share/gptme/logs/task/config.toml": '[chat]\nname = "task"\nworkspace = "."\n'},
        note="""\
Name the conversation in this file and in `--name`. Without a name, gptme asks the model for a title, which is a
separate row. Without `workspace`, it works in a folder beside the file once the file exists.""",
    ),
    Harness(
        "mistral-vibe",
        "mistral-vibe",
        "mistral-vibe.txt",
        'vibe --prompt "TASK" --auto-approve --trust',
        replies=(
            f"I look first.\n{said('bash', command='cat double.py')}",
            said("bash", command="sed -i 's/ + 1//' double.py"),
            "It is fixed.",
        ),
        env={"OPENAI_API_KEY": "API_KEY"},
        files={
            ".vibe/config.toml": """\
active_model = "MODEL"
enable_telemetry = false
enable_update_checks = false

[[providers]]
name = "rollout"
api_base = "BASE_URL"
api_key_env_var = "OPENAI_API_KEY"

[[models]]
name = "MODEL"
alias = "MODEL"
provider = "rollout"
"""
        },
        note="It needs Python 3.12.",
    ),
    Harness(
        "Griptape",
        "griptape[drivers-prompt-openai]",
        "griptape.txt",
        "python griptape_agent.py",
        replies=(*renamed(SUMS[:2], add="Sums_add"), "It is 9, then 10."),
        reasons=("first_call", "history_rewritten"),
        note="""\
The calls of one `run` are one row. Griptape's memory keeps the question and the answer of a run without its tool
calls, so the next `run` opens a new row.""",
    ),
    Harness(
        "Mirascope",
        "mirascope[anthropic,openai]",
        "mirascope.txt",
        "python mirascope_loop.py",
        ALL,
        note="For OpenAI's APIs, it cuts the model's name at its first slash: set a `model.name` without one.",
    ),
    Harness(
        "Agency Swarm",
        "agency-swarm",
        "agency-swarm.txt",
        "python agency_swarm_agent.py",
        note="It needs Python 3.12.",
    ),
    Harness(
        "Qwen-Agent",
        "qwen-agent[python_executor] soundfile tqdm",
        "qwen-agent.txt",
        "python qwen_agent_loop.py",
        note="""\
With `use_raw_api`, the gateway parses the tool calls. Otherwise, Qwen-Agent writes the tools into the system prompt
and parses the calls itself. Its version 0.0.34 needs the extra `python_executor`, soundfile and tqdm, or its import
fails.""",
    ),
    Harness(
        "langroid",
        "langroid litellm",
        "langroid.txt",
        "python langroid_agent.py",
        reasons=("first_call", *["history_rewritten"] * 3),
        note="""\
langroid adds the field `request` to the arguments of each call that it returns, and the next call opens a new row:
a deployed model reads this field too, so [an equal call id](token-identity.md#rows-and-segments) is not enough.
`import langroid` downloads a vocabulary of tiktoken, which fails in a container without the internet. Import
`litellm.litellm_core_utils.default_encoding` first, which has it, or set `TIKTOKEN_CACHE_DIR` in the image and import
langroid there once.""",
    ),
    Harness(
        "magentic",
        "magentic openai",
        "magentic.txt",
        "python magentic_loop.py",
        note="""\
Set `output_types=[StreamedResponse]`. Without it, magentic takes the text beside a tool call for the answer and drops
the call.""",
    ),
    Harness(
        "Upsonic",
        "upsonic",
        "upsonic.txt",
        "python upsonic_agent.py",
        note="""\
Set `feed_tool_call_results=True` on `Chat`. Without it, Upsonic leaves tool calls out of the history of the next
question, which opens a new row.""",
    ),
    Harness(
        "fast-agent",
        "fast-agent-mcp",
        "fast-agent.txt",
        "python fast_agent_loop.py",
        env={"GENERIC_BASE_URL": "BASE_URL", "GENERIC_API_KEY": "API_KEY"},
        note="It needs Python 3.12.",
    ),
    Harness(
        "nanobot",
        "nanobot-ai",
        "nanobot.txt",
        'nanobot agent --workspace . --message "TASK"',
        replies=(
            f"I look first.\n{said('exec', command='cat double.py')}",
            said("exec", command="sed -i 's/ + 1//' double.py"),
            "It is fixed.",
        ),
        files={
            ".nanobot/config.json": """\
{
  "providers": {"custom": {"apiBase": "BASE_URL", "apiKey": "API_KEY"}},
  "agents": {"defaults": {"provider": "custom", "model": "MODEL", "contextWindowTokens": CONTEXT_LENGTH}}
}
"""
        },
    ),
    Harness(
        "Hermes Agent",
        "hermes-agent",
        "hermes-agent.txt",
        'hermes --oneshot "TASK" --toolsets terminal,file',
        replies=(
            f"I look first.\n{said('terminal', command='cat double.py')}",
            said("terminal", command="sed -i 's/ + 1//' double.py"),
            "It is fixed.",
        ),
        files={
            ".hermes/config.yaml": """\
model:
  provider: custom
  default: MODEL
  base_url: BASE_URL
  api_key: API_KEY
  context_length: CONTEXT_LENGTH
"""
        },
        errors=("not_found",),
        note="On a private address, it probes for other servers' paths, which are answered 404.",
    ),
    Harness(
        "pi",
        "@mariozechner/pi-coding-agent",
        "pi.json",
        'pi --provider rollout --model MODEL --print "TASK"',
        replies=(
            f"I look first.\n{said('bash', command='cat double.py')}",
            said("bash", command="sed -i 's/ + 1//' double.py"),
            "It is fixed.",
        ),
        files={
            ".pi/agent/models.json": """\
{
  "providers": {
    "rollout": {
      "api": "openai-completions",
      "baseUrl": "BASE_URL",
      "apiKey": "API_KEY",
      "models": [{"id": "MODEL", "contextWindow": CONTEXT_LENGTH, "maxTokens": 4096}]
    }
  }
}
"""
        },
    ),
    Harness(
        "Continue CLI",
        "@continuedev/cli",
        "continue.json",
        'cn --config ~/.continue/config.yaml --auto --print "TASK"',
        replies=(
            f"I look first.\n{said('Bash', command='cat double.py')}",
            said("Bash", command="sed -i 's/ + 1//' double.py"),
            "It is fixed.",
        ),
        files={
            ".continue/config.yaml": """\
name: rollout
version: 1.0.0
schema: v1
models:
  - name: MODEL
    provider: openai
    model: MODEL
    apiBase: BASE_URL
    apiKey: API_KEY
    roles: [chat]
    defaultCompletionOptions:
      contextLength: CONTEXT_LENGTH
"""
        },
    ),
    Harness(
        "VoltAgent",
        "@voltagent/core @ai-sdk/openai-compatible ai zod",
        "voltagent.json",
        "node voltagent.mjs",
        replies=(*SUMS[:2], "It is 9, and then 10."),
        reasons=("first_call", "history_rewritten"),
        note="""\
The calls of one `generateText` are one row. VoltAgent's memory merges them into one message for the next
`generateText`, which opens a new row.""",
    ),
    Harness(
        "Genkit",
        "genkit @genkit-ai/compat-oai",
        "genkit.json",
        "node genkit.mjs",
        reasons=("first_call", "history_rewritten"),
        note="It drops the text of a reply that also calls a tool, and the next call opens a new row.",
    ),
    Harness(
        "Strands JS",
        "@strands-agents/sdk openai zod",
        "strands-js.json",
        "node strands.mjs",
        reasons=("first_call", "history_rewritten"),
        note="It drops the text of a reply that also calls a tool, and the next call opens a new row.",
    ),
    Harness(
        "NeMo Agent Toolkit",
        "nvidia-nat[langchain]",
        "nemo-agent-toolkit.txt",
        "python nemo_agent.py",
        replies=(*SUMS[:2], "It is 9, and then 10."),
        reasons=("first_call", "history_rewritten"),
        note="""\
A workflow's YAML takes the same fields. The calls of one run are one row. `tool_calling_agent` returns only the text
of its answer, so the next run, whose history has no tool calls, opens a new row.""",
    ),
    Harness(
        "Terminus-2",
        "harbor",
        "terminus.txt",
        "python terminus.py",
        replies=(
            typed("echo $((2 + 3))"),
            typed("echo $((5 + 4))"),
            typed("echo $((9 + 1))"),
            typed(done=True),
            typed(done=True),
        ),
        env={"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        note="""\
It needs Python 3.12 and tmux. Harbor runs it outside the container; in a rollout, give it an environment that runs
commands in its own container. The terminal's output is a user message: a template that leaves out the reasoning
before the newest user message, such as Qwen3's, opens a new row for each call (`rerendered`).""",
    ),
    Harness(
        name="Kimi Code",
        install="@moonshot-ai/kimi-code node",
        pins="kimi-code.json",
        command='kimi -p "TASK"',
        replies=(
            f"I look first.\n{said('Bash', command='cat double.py')}",
            said("Bash", command="sed -i 's/ + 1//' double.py"),
            "It is fixed.",
        ),
        env={
            "KIMI_MODEL_NAME": "MODEL",
            "KIMI_MODEL_PROVIDER_TYPE": "openai",
            "KIMI_MODEL_BASE_URL": "BASE_URL",
            "KIMI_MODEL_API_KEY": "API_KEY",
            "KIMI_MODEL_MAX_CONTEXT_SIZE": "CONTEXT_LENGTH",
            "KIMI_DISABLE_TELEMETRY": "1",
        },
        note="It needs Node.js 22.19.",
    ),
)


def find_python(version: str) -> str | None:
    """Return an interpreter of this version: uv's choice, or one of pyenv, whose shims run enabled versions only."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    for wanted in (version, *map(str, sorted(versions.glob(f"{version}.*/bin/python")))):
        found = run([find_uv_bin(), "python", "find", wanted], capture_output=True, text=True, check=False)
        if found.returncode == 0:
            return found.stdout.strip()
    return None


def installed(file: str) -> Path:
    """Install the packages of this file in pins/ once, in a folder of the cache; return the folder."""
    pins = FOLDER / "pins" / file
    digest = hashlib.sha256(pins.read_bytes()).hexdigest()[:8]
    folder = cache_dir() / "harnesses" / f"{pins.stem}-{digest}"
    ready = folder / ".ready"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if ready.exists():
            return folder
        shutil.rmtree(folder, ignore_errors=True)
        if pins.suffix == ".txt":
            python = find_python(PYTHON[file]) if file in PYTHON else sys.executable
            assert python, f"Python {PYTHON[file]} is not installed"
            run([find_uv_bin(), "venv", "--quiet", "--python", python, folder], check=True)
            run(
                [find_uv_bin(), "pip", "install", "--quiet", "--python", folder / "bin/python", "-r", pins],
                check=True,
            )
        else:
            folder.mkdir()
            shutil.copy(pins, folder / "package-lock.json")
            (folder / "package.json").write_text(json.dumps(json.loads(pins.read_text())["packages"][""]))
            run(["npm", "install", "--no-audit", "--no-fund", "--silent"], cwd=folder, check=True)
        ready.touch()
    return folder


def pin() -> None:
    """Write the newest versions into these files of pins/, by default into all."""
    for file in sys.argv[1:] or sorted(path.name for path in (FOLDER / "pins").iterdir()):
        path = FOLDER / "pins" / file
        installs = [each.install for each in HARNESSES if each.pins == file] or [SERVICES[file]]
        packages = sorted({word for install in installs for word in install.split()})
        if path.suffix == ".txt":
            options = [
                "--python-version",
                PYTHON.get(file, "3.11"),
                "--upgrade",
                "--no-annotate",
                "--no-header",
                "--quiet",
                "-o",
                str(path),
            ]
            run([find_uv_bin(), "pip", "compile", "-", *options], input="\n".join(packages), text=True, check=True)
            continue
        with TemporaryDirectory() as folder:
            # By itself, npm takes the newest version for its own Node.js, which agents with a binary do not need.
            newest = [
                f"{name}@{check_output(['npm', 'view', name, 'version'], text=True).strip()}" for name in packages
            ]
            options = ["--package-lock-only", "--omit-lockfile-registry-resolved", "--save-exact", "--silent"]
            run(["npm", "install", *options, *newest], cwd=folder, check=True)
            shutil.copy(Path(folder, "package-lock.json"), path)


if __name__ == "__main__":
    pin()
