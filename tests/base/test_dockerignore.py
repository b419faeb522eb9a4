"""Docker's rules for `.dockerignore`, by the test table of its own matcher (moby/patternmatcher)."""

import re
from pathlib import Path, PurePosixPath

import pytest

from rollout_backend.base.dockerignore import FilePatterns
from rollout_backend.errors import ConfigError
from rollout_backend.workbench.deploy.package import copy_agent

MATCHES = """
** file | ** dir/file | **/ file | **/ dir/file | **/** dir/file | dir/** dir/file | dir/** dir/dir2/file
**/dir dir/file | **/dir2/* dir/dir2/file | **/dir2/** dir/dir2/dir3/file | **file file | **file dir/file
**file dir/dir/file | **file dir/myfile | **/file file | **/file dir/file | **/file dir/dir/file
**/file* dir/dir/file | **/file* dir/dir/file.txt | **/file*txt dir/dir/file.txt | **/file*.txt dir/dir/file.txt
**/file*.txt* dir/dir/file.txt | **/**/*.txt dir/dir/file.txt | **/*.txt file.txt | **/**/*.txt file.txt
a**/*.txt a/file.txt | a**/*.txt a/dir/file.txt | a**/*.txt a/dir/dir/file.txt | a/*.txt a/file.txt
a/*.txt** a/file.txt | a[b-d]e ace | a[^b-d]e aze | .* .foo | abc.def abc.def | abc?def abcZdef | a\\* a*
a\\\\ a\\ | **/foo/bar foo/bar | **/foo/bar dir/foo/bar | **/foo/bar dir/dir2/foo/bar | abc/** abc/def
abc/** abc/def/ghi | **/.foo .foo | a(b)c/def a(b)c/def | a.|)$(}+{bc a.|)$(}+{bc | dist/*.whl dist/a-2.4+g08-py3.whl
a/**/b a/b | a/**/b a/c/d/b | ./a a | /a a | a/ a/b | a//b a/b | a/./b a/b | a/../b b | a a/b/c | ^a ^a | a^ a^
"""
DIFFERS = """
**/**/*.txt2 dir/dir/file.txt | a/*.txt a/dir/file.txt | a[b-d]e ae | a[b-d]e aae | .* foo | abc.def abcdef
abc.def abcZdef | abc?def abcdef | abc?def abc/def | abc/** abc | **/.foo bar.foo | a(b)c/def a(b)c/xyz
*.json data/table.json | */cache tools/web/cache | a b/a | **/file myfile | A a | a\\* ab | #a #a | a ab
"""
SEVERAL = [
    ("**\n!util/docker/web", "util/docker/web/foo", False),
    ("**\n!util/docker/web\nutil/docker/web/foo", "util/docker/web/foo", True),
    ("**\n!dist/*.whl", "dist/proxy.py-2.4.0rc3.dev36+g08acad9-py3-none-any.whl", False),
    ("!a\n*", "a", True),
    ("*\n! a ", "a", False),
    ("a\n!a/b", "a/b", False),
    ("a\n!a/b", "a/c", True),
    (" # a\na", "a", True),
    ("\ufeffa", "a", False),
]


def pairs(table: str) -> list[list[str]]:
    return [each.split(" ") for each in re.split(r" \| |\n", table.strip())]


def test_the_table_of_dockers_matcher() -> None:
    for ignored, table in ((True, MATCHES), (False, DIFFERS)):
        for pattern, name in pairs(table):
            assert (PurePosixPath(name) in FilePatterns([pattern])) is ignored, (pattern, name)
    for lines, name, ignored in SEVERAL:
        assert (PurePosixPath(name) in FilePatterns(lines.splitlines())) is ignored, (lines, name)


@pytest.mark.parametrize("pattern", ["!", "a[", "[b-a]"])
def test_a_pattern_that_docker_refuses_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match=rf"invalid pattern '{re.escape(pattern)}'"):
        FilePatterns([pattern])


def test_a_byte_order_mark_hides_no_line(tmp_path: Path) -> None:
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "secrets.yaml").write_text("x")
    (tmp_path / "agent" / ".dockerignore").write_text("secrets.yaml\n", encoding="utf-8-sig")
    copy_agent(tmp_path / "agent", tmp_path / "content")
    assert not (tmp_path / "content").exists()
