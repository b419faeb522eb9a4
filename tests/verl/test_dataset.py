"""Payloads pass through verl's own loaders and reach the agent unchanged."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import DictConfig
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import AutoTokenizer
from verl import DataProto
from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn

import rollout_backend.workbench.local
from rollout_backend.core.tasks import Task, priority_of
from rollout_backend.errors import TaskFileError
from rollout_backend.verl import early_checks
from rollout_backend.verl.dataset import PLACEHOLDER, PayloadDataset
from rollout_backend.verl.task_rows import TaskIds, check_own_dataset, payload_of, private_of, task_id_of
from rollout_backend.verl.v1_batch import rows_of_tensordict
from trainings import verl_settings

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata warns about torch

PAYLOADS: list[dict[str, Any]] = [
    {"question": "2 + 2?", "answer": 4, "deep": {"list": [1, [2.5, None], {}], "flag": True}, "text": "ü\n\u2028"},
    {"question": "3 + 3?", "big": 2**53 + 1},
    {"question": "4 + 4?", "empty": []},
    {"other": "no question here"},
]


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(Path(rollout_backend.workbench.local.__file__).parent / "byte_model")


@pytest.fixture
def data_config() -> Callable[..., DictConfig]:
    def make(*overrides: str) -> DictConfig:
        custom = [
            "data.custom_cls.path=pkg://rollout_backend.verl.dataset",
            "data.custom_cls.name=PayloadDataset",
            "data.shuffle=False",
        ]
        return verl_settings(*custom, *overrides).data

    return make


@pytest.fixture
def make_dataset(data_config: Callable[..., DictConfig], tokenizer: Any) -> Callable[..., Any]:
    """Let verl make its dataset of some files. Further arguments override its settings."""

    def make(paths: Any, *overrides: str, **more: Any) -> Any:
        return create_rl_dataset(paths, data_config(*overrides), tokenizer, None, **more)

    return make


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(rows: list[Any], name: str = "sums.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


def parquet(path: Path, **columns: Any) -> str:
    pq.write_table(pa.table(columns), path)
    return str(path)


def batches(dataset: Any, config: DictConfig, size: int = 2) -> list[dict[str, Any]]:
    sampler = create_rl_sampler(config, dataset)
    return list(StatefulDataLoader(dataset, batch_size=size, collate_fn=collate_fn, sampler=sampler))


def v1_rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows that the manager reads from the v1 trainer's batch."""
    batch["uid"] = np.array([f"u{i}" for i in range(len(batch["raw_prompt"]))], dtype=object)
    data = tu.get_tensordict(batch)
    return list(rows_of_tensordict(data))


def legacy_rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    data = DataProto.from_single_dict(batch).repeat(repeat_times=2, interleave=True)
    return [{key: values[i] for key, values in data.non_tensor_batch.items()} for i in range(0, len(data), 2)]


def test_a_training_file_without_a_whole_batch_is_refused(jsonl, make_dataset):
    """verl's v1 trainer would divide by the number of its batches, 0, after it has validated."""
    path = jsonl([{"payload": payload} for payload in PAYLOADS])
    files = (f"data.train_files={path}", f"data.val_files={path}")
    with pytest.raises(TaskFileError, match=r"has 4 rows, and data\.train_batch_size is 5"):
        make_dataset(path, *files, "data.train_batch_size=5")
    with pytest.raises(TaskFileError, match="has 3 rows"):
        make_dataset(path, *files, "data.train_batch_size=4", "data.train_max_samples=3", max_samples=3)
    fits = "data.train_batch_size=4"
    for more in ([fits], ["data.train_batch_size=5", "trainer.val_only=True"], [fits, "data.val_max_samples=3"]):
        assert len(make_dataset(path, *files, *more, max_samples=3 if "data.val_max_samples=3" in more else -1)) >= 3


# --- payloads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("through", [v1_rows, legacy_rows])
@pytest.mark.parametrize("kind", ["jsonl", "parquet of JSON text"])
def test_payloads_pass_through_verl_unchanged(kind, through, tmp_path, jsonl, data_config, tokenizer):
    if kind == "jsonl":
        path = jsonl([{"payload": payload} for payload in PAYLOADS])
    else:
        path = parquet(tmp_path / "sums.parquet", payload=[json.dumps(payload) for payload in PAYLOADS])
    config = data_config()
    dataset = create_rl_dataset([path], config, tokenizer, None)

    assert isinstance(dataset, PayloadDataset)
    rows = [row for batch in batches(dataset, config) for row in through(batch)]
    assert [payload_of(row) for row in rows] == PAYLOADS
    assert [row["task_id"] for row in rows] == [f"task-{i:05d}" for i in range(4)]
    assert {row["data_source"] for row in rows} == {"sums"}


def test_a_struct_column_holds_the_fields_of_all_rows(tmp_path, make_dataset):
    path = parquet(tmp_path / "a.parquet", payload=[{"q": "x", "n": 1}, {"q": "y"}], task_id=["one", None])
    dataset = make_dataset(path)
    assert [payload_of(dataset[i]) for i in range(2)] == [{"n": 1, "q": "x"}, {"n": None, "q": "y"}]
    assert [dataset[i]["task_id"] for i in range(2)] == ["one", "task-00001"]


def test_verl_shows_the_payloads_prompt(jsonl, make_dataset, tokenizer):
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path = jsonl(
        [{"payload": {"question": "2 + 2?"}}, {"payload": {"question": messages}}, {"payload": {"question": 7}}]
    )
    dataset = make_dataset(path, "data.prompt_key=question")
    assert [dataset[i]["raw_prompt"] for i in range(3)] == [
        [{"role": "user", "content": "2 + 2?"}],
        messages,
        [{"role": "user", "content": PLACEHOLDER}],
    ]
    assert tokenizer.apply_chat_template(dataset[0]["raw_prompt"], tokenize=True, return_dict=False)


def test_other_columns_are_kept(jsonl, data_config, tokenizer):
    first = jsonl([{"payload": {}, "data_source": "gsm8k", "reward_model": {"ground_truth": "4"}}])
    second = jsonl([{"payload": {}, "level": 2}], "more.jsonl")
    config = data_config()
    (batch,) = batches(create_rl_dataset([first, second], config, tokenizer, None), config)

    assert list(batch["data_source"]) == ["gsm8k", "more"]
    assert list(batch["reward_model"]) == [{"ground_truth": "4"}, None]
    assert list(batch["level"]) == [None, 2]
    assert list(batch["index"]) == [0, 1]
    assert batch["dummy_tensor"].shape == (2, 1)


def test_max_samples_chooses_rows(jsonl, make_dataset):
    path = jsonl([{"payload": {"i": i}} for i in range(20)])

    def chosen(count: int, *overrides: str) -> list[int]:
        dataset = make_dataset(path, *overrides, max_samples=count)
        return [payload_of(dataset[i])["i"] for i in range(len(dataset))]

    assert chosen(3) == [0, 1, 2]
    assert chosen(-1) == chosen(99) == list(range(20))
    some = chosen(5, "data.shuffle=True", "data.seed=1")
    assert some == chosen(5, "data.shuffle=True", "data.seed=1") != chosen(5, "data.shuffle=True", "data.seed=2")
    assert len(set(some)) == 5


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "answer": 4}, r"line 2: there is no payload, only \['answer', 'prompt'\].*custom_cls"),
        ([1], "line 2: there is no payload"),
        ({"payload": "no json"}, "line 2: payload is a string, but not valid JSON"),
        ({"payload": {"x": float("nan")}}, r"line 2: payload\.x is nan, which is not valid JSON"),
        ({"payload": {"x": json.loads("[" * 250 + "]" * 250)}}, "line 2: .*nested deeper than 200 levels"),
        ({"payload": '{"x": ' + "[" * 900 + "]" * 900 + "}"}, "line 2: .*nested"),
        ({"payload": {"_rollout": 1}}, "must not have a field '_rollout'"),
        ({"payload": {}, "task_id": "a/b"}, "line 2: task_id 'a/b' must be"),
    ],
)
def test_an_invalid_row_is_named_when_the_dataset_is_made(row, message, jsonl, make_dataset):
    path = jsonl([{"payload": {}}, row])
    with pytest.raises(TaskFileError, match=f"sums.jsonl, {message}" if message.startswith("line") else message):
        make_dataset(path)


def test_missing_and_empty_files_are_refused(tmp_path, jsonl, make_dataset):
    with pytest.raises(TaskFileError, match="there is no task file"):
        make_dataset(str(tmp_path / "none.jsonl"))
    with pytest.raises(TaskFileError, match=r"has no rows: set data\.train_files"):
        make_dataset(jsonl([]))


def test_a_folder_of_harbor_tasks_is_a_dataset(tmp_path, make_dataset):
    for name, text in {"task.toml": "", "instruction.md": "Fix it.", "tests/test.sh": "true"}.items():
        file = tmp_path / "tasks" / "fix-sum" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    [row] = make_dataset(f"harbor:{tmp_path / 'tasks'}", "data.prompt_key=instruction")
    assert (row["task_id"], row["data_source"], payload_of(row)["instruction"]) == ("fix-sum", "tasks", "Fix it.")
    assert private_of(row, scored=True) == json.loads(row["private"])
    assert set(json.loads(row["private"])) == {"harbor"}


# --- verl's own dataset -----------------------------------------------------------------------------------


@pytest.mark.parametrize("through", [v1_rows, legacy_rows])
def test_verls_own_dataset_makes_a_payload(through, tmp_path, data_config, tokenizer):
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    path = parquet(
        tmp_path / "gsm8k.parquet",
        prompt=[conversation, conversation[1:]],
        data_source=["gsm8k", "gsm8k"],
        priority=[3, None],
        reward_model=[{"style": "rule", "ground_truth": "4"}, {"style": "rule", "ground_truth": "5"}],
        extra_info=[{"index": 0, "split": "train"}, {"index": 1, "split": "train"}],
    )
    config = data_config("data.custom_cls.path=null", f"+data.cache_dir={tmp_path}")
    dataset = create_rl_dataset([path], config, tokenizer, None)
    (batch,) = batches(dataset, config)

    payloads = [payload_of(row) for row in through(batch)]

    assert payloads[0] == {
        "messages": conversation,
        "prompt": "2 + 2?",
        "ground_truth": "4",
        "data_source": "gsm8k",
        "extra_info": {"index": 0, "split": "train"},
    }
    assert payloads[1]["messages"] == conversation[1:]
    assert json.loads(json.dumps(payloads)) == payloads

    assert [priority_of(row) for row in through(batch)] == [3, 0]
    hidden = {"data_source": "gsm8k", "ground_truth": "4", "extra_info": {"index": 0, "split": "train"}}
    [row, _] = through(batch)
    assert private_of(row, scored=True) == hidden
    assert private_of(row, scored=False) is None
    shown = {"messages": conversation, "prompt": "2 + 2?", "data_source": "gsm8k"}
    assert payload_of(row, scored=True) == shown


def test_payload_of_plain_rows() -> None:
    assert payload_of({"payload": {"a": np.int64(1), "b": np.arange(2), "c": (1,)}}) == {
        "a": 1,
        "b": [0, 1],
        "c": [1],
    }
    assert payload_of(
        {"payload": None, "raw_prompt": np.array([{"role": "user", "content": ["x"]}], dtype=object)}
    ) == {"messages": [{"role": "user", "content": ["x"]}]}
    with pytest.raises(TaskFileError, match=r"neither a payload nor a raw_prompt.*PayloadDataset"):
        payload_of({"prompt": "x"})
    with pytest.raises(TaskFileError, match=r"extra_info\.image is <object"):
        payload_of({"raw_prompt": [], "extra_info": {"image": object()}})


# --- the ids of tasks -------------------------------------------------------------------------------------

UID = "5c0d2f8e-95d4-4f9c-b4ae-0d0a5b0a3a11"


def test_a_row_has_its_own_id_in_each_step():
    row, payload = {"task_id": "sum-6-5"}, {"question": "6 + 5"}
    assert [TaskIds().of({**row, "uid": uid}, payload) for uid in "ab"] == ["sum-6-5"] * 2
    assert TaskIds().of({"task_id": np.int64(7), "uid": UID}, payload) == "7"


def test_a_row_without_an_id_is_named_after_its_payload():
    names = [
        task_id_of({"uid": uid}, payload) for uid in "ab" for payload in ({"a": 1, "b": [2]}, {"a": 2, "b": [2]})
    ]
    assert names[:2] == names[2:]
    assert names[0] != names[1]
    assert task_id_of({}, {"b": [2], "a": 1}) == names[0]


@pytest.mark.parametrize("name", ["math/algebra 1", "_x", "ä", "", "-", "a" * 300, "." * 90])
def test_any_name_becomes_an_id_and_different_names_stay_different(name):
    ids = [task_id_of({"task_id": each}, {}) for each in (name, f"{name} ", f"{name}/")]
    assert len({*ids}) == 3
    for each in ids:
        Task(f"{each}-10000-greedy", {})  # raises where that is no id


def test_a_row_that_a_batch_has_twice_gets_another_id_for_the_second():
    ids = TaskIds()
    rows = [{"task_id": name, "uid": uid} for uid, name in enumerate(["a", "a-2", "a", "a"])]
    found = [ids.of(row, {}) for row in itertools.chain(rows, rows)]
    assert found == ["a", "a-2", "a-3", "a-4"] * 2


# --- bad rows, before verl starts an engine -----------------------------------------------------------------

PROMPT = [{"role": "user", "content": "2 + 2?"}]
BAD_COLUMNS: dict[str, tuple[dict[str, Any], str]] = {
    "an answer that is not JSON": ({"extra_info": {"made": 1e400}}, r"extra_info\.made is inf"),
    "a ground truth that is not JSON": (
        {"reward_model": {"ground_truth": float("nan")}},
        r"reward_model\.ground_truth is nan",
    ),
}


@pytest.mark.parametrize(("columns", "message"), BAD_COLUMNS.values(), ids=BAD_COLUMNS)
def test_a_row_whose_answer_a_scorer_cannot_get_is_found_at_the_start(columns, message, jsonl, monkeypatch):
    good = {"reward_model": {"ground_truth": "4"}, "extra_info": {"split": "train"}}
    own = [{"prompt": PROMPT, **good}, {"prompt": PROMPT, **good, **columns}]
    paths = {"payload": [{"payload": {}, **each} for each in own], "own": own}
    files = {name: jsonl(rows, f"{name}.jsonl") for name, rows in paths.items()}
    settings = type("Settings", (), {"runtime": None, "scoring": type("Scoring", (), {"enabled": True})})
    monkeypatch.setattr(early_checks, "check", lambda _: settings)
    with pytest.raises(TaskFileError, match=rf"payload\.jsonl, line 2: .*{message}"):
        PayloadDataset(files["payload"], None, {})
    with pytest.raises(TaskFileError, match=rf"own\.jsonl, line 2: .*{message}"):
        check_own_dataset({"val_files": [files["own"]]}, scored=True)


def test_rows_of_verls_own_dataset_are_checked_at_the_start(tmp_path, jsonl):
    images = [[b"not read"], [b"not read"]]
    good = parquet(tmp_path / "good.parquet", prompt=[PROMPT, PROMPT], images=images, data_source=["s", "s"])
    check_own_dataset({"train_files": good, "val_files": None}, scored=False)
    bad = parquet(tmp_path / "bad.parquet", question=[PROMPT, []])
    with pytest.raises(
        TaskFileError, match=r"bad\.parquet, row 2: question \(data\.prompt_key\) is \[\], and must be"
    ):
        check_own_dataset({"train_files": bad, "prompt_key": "question"}, scored=False)
    words = jsonl([{"prompt": "2 + 2?"}], "words.jsonl")
    with pytest.raises(TaskFileError, match="must be a list of messages"):
        check_own_dataset({"train_files": words}, scored=False)
    check_own_dataset({"train_files": words, "custom_cls": {"path": "own.py"}}, scored=False)
    check_own_dataset({"train_files": str(tmp_path / "missing.parquet")}, scored=False)
