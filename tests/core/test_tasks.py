import json
import math
from datetime import datetime
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest

from agent_wrapper.contract.codec import MAX_DEPTH
from rollout_backend.core.tasks import MAX_TASK_ID, Task, check_private, check_unique, read_tasks
from rollout_backend.errors import ConfigError, TaskFileError


@pytest.mark.parametrize("as_text", [False, True])
def test_a_parquet_file_is_read(tmp_path, as_text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = "train:1.parquet"
    payloads = [{"q": 1, "deep": {"a": [1, 2]}}, {"q": 2, "deep": {"a": []}}]
    column = [json.dumps(payload) for payload in payloads] if as_text else payloads
    pyarrow.parquet.write_table(pyarrow.table({"task_id": ["a", "b"], "payload": column}), tmp_path / file)
    assert [task.payload for task in read_tasks(file)] == payloads


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{", "line 2: not JSON"),
        ("[1]", "line 2: must be an object"),
        ('{"payload": 3}', "line 2: payload is missing, or is not an object"),
        ('{"payload": {}, "answer": 1}', "line 2: unknown field 'answer'"),
        ('{"payload": {}, "private": "7"}', "line 2: private is not an object"),
        ('{"payload": {}, "priority": "high"}', "line 2: priority is 'high', and must be a whole number"),
        ('{"payload": {}, "priority": true}', "line 2: priority is True"),
        ('{"payload": {}, "priority": 1.5}', "line 2: priority is 1.5"),
        ('{"payload": {}, "task_id": 7}', "line 2: task_id is 7"),
        ('{"payload": {}, "task_id": "../x"}', "line 2: task_id '../x' must be"),
        ('{"payload": {"_rollout": 1}}', "line 2: the payload of task .* must not have a field '_rollout'"),
    ],
)
def test_an_invalid_line_is_named(tmp_path, line, match):
    file = tmp_path / "t.jsonl"
    file.write_text('{"payload": {}}\n' + line + "\n")
    with pytest.raises(TaskFileError, match=match):
        read_tasks(file)


def test_a_private_part_is_read_and_written_again(tmp_path):
    rows = [{"task_id": "x", "payload": {"q": 1}, "private": {"answer": "7"}}, {"task_id": "y", "payload": {"q": 2}}]
    file = tmp_path / "t.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    first, second = tasks = read_tasks(file)
    assert (first.private, second.private) == ({"answer": "7"}, None)
    assert [task.as_row() for task in tasks] == rows
    assert "answer" not in repr(first)
    table = pyarrow.table({"payload": ["{}"], "private": ['{"answer": "7"}']})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert [task.private for task in read_tasks(tmp_path / "t.parquet")] == [{"answer": "7"}]


def test_a_priority_is_read_and_written_again(tmp_path):
    rows = [{"payload": {}, "task_id": "x", "priority": -2}, {"payload": {}, "task_id": "y"}]
    (tmp_path / "t.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tasks = read_tasks(tmp_path / "t.jsonl")
    assert [task.priority for task in tasks] == [-2, 0]
    assert [task.as_row() for task in tasks] == rows
    # Pandas writes integers next to a null as floats.
    for column in ([7.0, None], [7.0, float("nan")], [7, None]):
        pyarrow.parquet.write_table(
            pyarrow.table({"payload": ["{}"] * 2, "priority": column}), tmp_path / "t.parquet"
        )
        assert [task.priority for task in read_tasks(tmp_path / "t.parquet")] == [7, 0]
    with pytest.raises(TaskFileError, match=r"priority=1\.0: it must be an int"):
        Task("a", {}, priority=1.0)


def test_a_private_part_needs_a_scorer():
    tasks = [Task("a", {}), Task("b", {}, private={"answer": "7"})]
    check_private(tasks, scored=True)
    check_private(tasks[:1], scored=False)
    with pytest.raises(ConfigError, match=r"task 'b' has a private part.*set scoring.function"):
        check_private(tasks, scored=False)


def test_what_ends_a_line_in_a_text_does_not_end_a_line_of_the_file(tmp_path):
    file = tmp_path / "t.jsonl"
    texts = ["a\u2028b", "a\u2029b", "a\x85b", "a\x0cb", "a\x1cb"]
    lines = [f'{{"payload": {{"q": {json.dumps(text, ensure_ascii=ord(text[1]) < 32)}}}}}' for text in texts]
    file.write_bytes("\r\n".join(["\ufeff" + lines[0], *lines[1:]]).encode())
    assert [task.payload["q"] for task in read_tasks(file)] == texts


def nested(levels: int) -> object:
    value: object = 1
    for i in range(levels):
        value = [value] if i % 2 else {"a": value}
    return value


UNREACHABLE = [
    (nested(MAX_DEPTH), "payload is nested deeper than 200 levels"),
    ("\ud83d", r"payload\.q holds '\\ud83d', half of a surrogate pair"),
    ({"\udc00": 1}, r"a key of payload\.q holds"),
    ([0.5, math.nan], r"payload\.q\.1 is nan, which JSON does not know"),
    (1 << 20_000, r"payload\.q is a whole number of 20001 bits"),
    (b"\xff", r"payload\.q is b'\\xff', a bytes, which JSON does not know: write it as a string"),
    ({1: 2}, r"payload\.q has the key 1, which is not a string"),
]


@pytest.mark.parametrize(("value", "match"), UNREACHABLE, ids=[match for _, match in UNREACHABLE])
def test_a_payload_that_cannot_reach_an_agent_is_refused(value, match):
    with pytest.raises(TaskFileError, match=f"task 'x' cannot reach an agent: .*{match}"):
        Task("x", {"q": value})


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 250 + "]" * 250, "line 2: .*payload is nested deeper than 200 levels"),
        ("[" * 100_000 + "]" * 100_000, "line 2: not JSON: it is nested too deep"),
        ("1e999", r"line 2: .*payload\.q is inf"),
        ("1" * 5000, "line 2: not JSON: .*limit"),
        ('{"a": {"b": 1, "c": 2, "b": 1}}', "line 2: not JSON: the key 'b' occurs twice in one object"),
    ],
)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_the_line_of_such_a_payload_is_named(tmp_path, text, match, kind):
    file = tmp_path / f"t.{kind}"
    payloads = ["{}", f'{{"q": {text}}}']
    if kind == "jsonl":
        file.write_text("\n".join(f'{{"payload": {payload}}}' for payload in payloads))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"payload": payloads}), file)
        match = match.replace("line 2: not JSON", "row 1: payload is not JSON").replace("line 2", "row 1")
    with pytest.raises(TaskFileError, match=match):
        read_tasks(file)


@pytest.mark.parametrize("value", [b"\xff", Decimal("1.5"), datetime(2026, 1, 1), math.nan])
def test_a_parquet_column_that_is_not_json_is_refused(tmp_path, value):
    file = tmp_path / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"payload": [{"q": None}, {"q": value}]}), file)
    with pytest.raises(TaskFileError, match=r"row 1: .*payload\.q is .*which JSON does not know"):
        read_tasks(file)


def test_nulls_that_a_library_fills_in_are_named(tmp_path, caplog):
    """A Parquet struct has the fields of all rows, and `Dataset.to_json` writes those that a row lacks."""
    payloads = [
        {"q": "a", "tools": [{"name": "x", "limit": 3}, {"name": "y"}], "note": None},
        {"q": "b", "hint": "h", "note": None},
    ]
    parquet, jsonl, text = (tmp_path / name for name in ("t.parquet", "t.jsonl", "text.parquet"))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"payload": each} for each in payloads]), parquet)
    jsonl.write_text("\n".join(json.dumps({"payload": task.payload}) for task in read_tasks(parquet)))
    [warning] = caplog.messages
    assert "payload.hint, payload.tools, payload.tools[].limit: null in some rows" in warning
    assert "JSON text" in warning
    caplog.clear()
    read_tasks(jsonl)
    assert "payload.tools[].limit: null in some rows" in caplog.text
    caplog.clear()
    pyarrow.parquet.write_table(pyarrow.table({"payload": [json.dumps(each) for each in payloads]}), text)
    assert [task.payload for task in read_tasks(text)] == payloads
    assert not caplog.messages


@pytest.mark.parametrize("kind", [pyarrow.timestamp("s"), pyarrow.timestamp("s", "Nowhere/Town")])
def test_values_that_python_cannot_hold_are_refused(tmp_path, kind):
    file = tmp_path / "t.parquet"
    column = pyarrow.array([{"at": 10**15}], pyarrow.struct([("at", kind)]))
    pyarrow.parquet.write_table(pyarrow.table({"payload": column}), file)
    with pytest.raises(TaskFileError, match=r"t\.parquet has a string, time or time zone that cannot be read"):
        read_tasks(file)


def test_maps_of_parquet_are_refused(tmp_path):
    file = tmp_path / "t.parquet"
    kind = pyarrow.struct([("m", pyarrow.map_(pyarrow.string(), pyarrow.int64()))])
    pyarrow.parquet.write_table(pyarrow.table({"payload": pyarrow.array([{"m": {"a": 1}}], kind)}), file)
    with pytest.raises(TaskFileError, match="the column payload holds maps of Parquet: write it as JSON text"):
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


def test_a_doubled_task_id_names_the_file_and_both_lines(tmp_path):
    file = tmp_path / "tasks.jsonl"
    file.write_text("".join(f'{{"task_id": "{name}", "payload": {{}}}}\n' for name in "aba"))
    with pytest.raises(TaskFileError, match=r"tasks\.jsonl, line 3: task_id 'a' occurs twice, first in line 1"):
        read_tasks(file)
    with pytest.raises(TaskFileError, match="'a' occurs twice"):
        check_unique([Task("a", {}), Task("b", {}), Task("a", {})])


def test_an_id_is_bounded_so_that_the_rollouts_number_fits():
    Task("a" * MAX_TASK_ID, {"deep": nested(MAX_DEPTH - 1), "text": "\U0001f600\u2028", "numbers": (10**300, None)})
    for task_id in ("a" * (MAX_TASK_ID + 1), 3):
        with pytest.raises(TaskFileError, match="must be 1 to 100"):
            Task(task_id, {})
    for rollouts in (0, 2.5, "4"):
        with pytest.raises(TaskFileError, match=f"rollouts={rollouts!r}: it must be an int from 1 on"):
            Task("a", {}, rollouts=rollouts)
