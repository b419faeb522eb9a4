import json

import pyarrow
import pyarrow.parquet
import pytest

from rollout_backend.errors import TaskFileError
from rollout_backend.tasks import MAX_TASK_ID, Task, read_tasks, unique


def test_jsonl(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"task_id": "x", "payload": {"q": 1}}\n\n{"payload": {"q": "é"}}\n', encoding="utf-8")
    first, second = read_tasks(file)
    assert (first.task_id, first.payload) == ("x", {"q": 1})
    assert (second.task_id, second.payload) == ("task-00001", {"q": "é"})


@pytest.mark.parametrize("as_text", [False, True])
def test_parquet(tmp_path, as_text):
    file = tmp_path / "t.parquet"
    payloads = [{"q": 1, "deep": {"a": [1, 2]}}, {"q": 2, "deep": {"a": []}}]
    column = [json.dumps(payload) for payload in payloads] if as_text else payloads
    pyarrow.parquet.write_table(pyarrow.table({"task_id": ["a", "b"], "payload": column}), file)
    assert [task.payload for task in read_tasks(file)] == payloads


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be an object"),
        ("{}", "line 2: payload is missing"),
        ('{"payload": 3}', "line 2: payload is missing, or is not an object"),
        ('{"payload": {}, "answer": 1}', "line 2: unknown field 'answer'"),
        ('{"payload": {}, "task_id": 7}', "line 2: task_id is 7"),
        ('{"payload": {}, "task_id": "../x"}', "line 2: task_id '../x' must be"),
        ('{"payload": {"_rollout": 1}}', "line 2: the payload of task .* must not have a field '_rollout'"),
    ],
)
def test_a_broken_line_is_named(tmp_path, line, match):
    file = tmp_path / "t.jsonl"
    file.write_text('{"payload": {}}\n' + line + "\n")
    with pytest.raises(TaskFileError, match=match):
        read_tasks(file)


def test_a_broken_row_is_named(tmp_path):
    file = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"payload": ["{}", "{"]}), file)
    with pytest.raises(TaskFileError, match="row 1: payload is not JSON"):
        read_tasks(file)


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("none.jsonl", None, "there is no task file"),
        ("t.csv", b"", "must be a .jsonl or a .parquet file"),
        ("t.parquet", b"PAR1 not really", "is not a parquet file"),
        ("t.jsonl", b"", "there is no task"),
        ("t.jsonl", b"\xff\xfe", "is not UTF-8"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, name, content, match):
    file = tmp_path / name
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(TaskFileError, match=match):
        read_tasks(file)


def test_two_tasks_of_one_id_are_refused():
    with pytest.raises(TaskFileError, match="'a' occurs twice"):
        unique([Task("a", {}), Task("b", {}), Task("a", {})])


def test_an_id_leaves_room_for_the_rollouts_number():
    Task("a" * MAX_TASK_ID, {})
    with pytest.raises(TaskFileError, match="must be 1 to 100"):
        Task("a" * (MAX_TASK_ID + 1), {})
