"""YAML with line numbers."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import ConfigError
from podium.recipe.document import parse, read_document, scalar


def values(text: str):
    document = parse(text, name="r.yaml")
    assert not document.problems
    return document.values


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-6", 1e-6),
        ("2", 2),
        ("08", 8),
        ("-3", -3),
        ("0x1F", 31),
        ("0o17", 15),
        ("1.", 1.0),
        (".5", 0.5),
        ("on", "on"),
        ("no", "no"),
        ("12:30", "12:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("true", True),
        ("null", None),
        ("~", None),
        ("", None),
        ("'1'", "1"),
        ("[1, x]", [1, "x"]),
        ("{a: 1e3}", {"a": 1000.0}),
        (".inf", math.inf),
    ],
)
def test_core_rules_of_yaml_1_2(text, value):
    assert values(f"key: {text}") == {"key": value}
    assert type(values(f"key: {text}")["key"]) is type(value)


@given(st.floats(allow_nan=False) | st.integers() | st.booleans() | st.none())
def test_what_yaml_writes_is_read_back(value):
    import yaml

    assert values(yaml.safe_dump({"key": value})) == {"key": value}


@given(st.text())
def test_any_text_is_read_or_refused_in_one_way(text):
    """Whatever a file holds, the outcome is a document or a `ConfigError`."""
    with contextlib.suppress(ConfigError):
        assert isinstance(parse(text, name="r.yaml").values, dict)


def test_lines_are_kept_for_nested_values():
    document = parse("a: 1\nlora:\n  r: 4\nrewards:\n  - x\n  - name: y\n    weight: 2\n", name="r.yaml")
    assert document.where(("lora", "r")) == "r.yaml:3"
    assert document.where(("rewards", 1, "weight")) == "r.yaml:7"
    assert document.where(("rewards", 0, "deeper")) == "r.yaml:5"
    assert document.where(("nowhere",)) == "r.yaml"


def test_duplicate_keys_name_both_lines():
    (problem,) = parse("beta: 1\nx: 2\nbeta: 3\n", name="r.yaml").problems
    assert (problem.where, problem.what) == ("r.yaml:3", "`beta` is already set at line 1")


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{name}: &{name} [{','.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefg", "bcdefgh", strict=True)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:\n\tb: 1", "r.yaml:2: a tab"),
        ("a: b: c", "r.yaml:1: a second `:`"),
        ("- 1", r"r.yaml:1: expected keys with values .*got a list"),
        ("just words", "r.yaml:1: expected keys with values"),
        (BOMB, "aliases .* multiply"),
        ("a: &a [*a]", "contains itself"),
        ("[" * 3000, "nested too deeply"),
        ("a: [1", "r.yaml:1"),
    ],
)
def test_what_is_refused_at_once(text, message):
    with pytest.raises(ConfigError, match=message):
        parse(text, name="r.yaml")


def test_tags_are_refused_and_never_run():
    (problem,) = parse("a: !!python/object/apply:os.system ['true']", name="r.yaml").problems
    assert "tags (!!python/object/apply:os.system) are not taken" in str(problem)


def test_large_and_undecodable_files_are_refused(tmp_path):
    (tmp_path / "r.yaml").write_bytes(b"#" * 1_000_001)
    with pytest.raises(ConfigError, match=r"1,000,001 bytes.*Is this the dataset"):
        read_document(tmp_path / "r.yaml", "r.yaml")
    (tmp_path / "r.yaml").write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(ConfigError, match=r"r.yaml:2: byte 0xFF"):
        read_document(tmp_path / "r.yaml", "r.yaml")


def test_words_of_the_command_line_follow_the_same_rules():
    assert scalar('{"dtype": "float32"}') == {"dtype": "float32"}
    assert scalar("[unfinished") == "[unfinished"
    assert scalar("a: b") == "a: b"
