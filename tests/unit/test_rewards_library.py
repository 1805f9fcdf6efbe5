"""The library's rewards, on plain text and on conversations."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import podium.rewards as library
from podium.data import load
from podium.errors import ConfigError
from podium.records import Completion, Group, Prompt
from podium.rewards import LIBRARY, check_rewards, library_reward, mathematics, resolve_rewards, score
from podium.rewards.resolve import library_function


@pytest.fixture(params=["plain", "chat"])
def wrapped(request):
    """Makes completions of texts, in either form."""
    if request.param == "plain":
        return list
    return lambda texts: [[{"role": "assistant", "content": text}] for text in texts]


def test_every_reward_has_an_example():
    without = [name for name in LIBRARY if ">>> " not in (library_function(name).__doc__ or "")]
    assert without == ["reasoning_gym", "reward_model"]  # need a sandbox, a model


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("<answer>7</answer>", "7", 1.0),
        ("so <answer>\n 7 </answer>.", " 7\n", 1.0),
        ("<answer>7</answer>", 7, 1.0),
        ("<answer>6</answer><answer>7</answer>", "7", 1.0),
        ("<answer>7</answer><answer>6</answer>", "7", 0.0),
        ("<answer> <answer>7</answer>", "7", 1.0),
        ("<answer>17</answer>", "7", 0.0),
        ("<answer>07</answer>", "7", 0.0),
        ("<answer></answer>", "", 1.0),
        ("7", "7", 0.0),
        ("</answer>7<answer>", "7", 0.0),
        ("<answer>7", "7", 0.0),
        ("", "", 0.0),
        ("<answer>7</answer>", None, None),
        ("<answer>None</answer>", None, None),
    ],
)
def test_answer_correct(wrapped, text, answer, expected):
    assert library.answer_correct(wrapped([text]), answer=[answer]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>7</answer>", 1.0),
        (" <answer> seven\n</answer>\n", 1.0),
        ("<answer></answer>", 0.5),
        ("<answer> </answer>", 0.5),
        ("The answer is <answer>7</answer>", 0.5),
        ("<answer>7</answer><answer>7</answer>", 0.5),
        ("<answer><b>7</b></answer>", 0.5),
        ("<answer>7", 0.25),
        ("7</answer>", 0.25),
        ("answer: 7", 0.0),
        ("", 0.0),
    ],
)
def test_answer_format(wrapped, text, expected):
    assert library.answer_format(wrapped([text])) == [expected]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("42", 42, 1.0),
        ("It is 42.", "42", 1.0),
        ("42.0000001", 42, 0.0),  # whole numbers must be equal
        ("0.50000001", 0.5, 1.0),
        ("42.1", 42, 0.0),
        ("1,234.5", 1234.5, 1.0),
        ("first 42, then 43", 42, 0.0),
        ("<answer>42</answer> (not 43)", 42, 1.0),
        ("<answer>none</answer> 42", 42, 0.0),
        ("-5", -5, 1.0),
        ("7-5", 5, 0.0),  # a difference, and no result
        ("7-5=2", 2, 1.0),
        (".5", 0.5, 1.0),
        ("4.2e1", 42, 1.0),
        ("1e999", 42, 0.0),
        ("nothing", 42, 0.0),
        ("72", "48/2 = 24\n48+24 = 72\n#### 72", 1.0),
        ("42", "unknown", None),
        ("42", None, None),
    ],
)
def test_numeric_match(wrapped, text, answer, expected):
    assert library.numeric_match(wrapped([text]), answer=[answer]) == [expected]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("<answer>42</answer>", 42, 1.0),
        ("43", "42", 0.5),
        ("<answer>39</answer> of 42", "42", 0.25),
        ("<answer>none</answer> 42", 42, 0.0),
        ("1e999", 42, 0.0),
        ("nothing", 42, 0.0),
        ("44", ["42", "45"], 0.5),
        ("42", "unknown", None),
        ("42", "1e999", None),
        ("42", None, None),
    ],
)
def test_numeric_closeness(wrapped, text, answer, expected):
    assert library.numeric_closeness(wrapped([text]), answer=[answer]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2 - 9 = -7, -7 + 5 = -2 <answer>-2</answer>", 1.0),
        ("2 - 9 = -7, -7 + 5 = -2", 1.0),
        ("2 - 9 = 7, 7 + 5 = 12 <answer>12</answer>", 0.5),
        ("2 - 9 = 7, -7 + 5 = -2", 0.0),
        ("2 - 9 = -7 <answer>-2</answer>", 0.25),
        ("2 - 9 = -7, -7 + 5 = -2, -2 + 0 = -2", 0.5),
        ("1 + 1 = 2, 2 + 2 = 4", 0.0),
        ("<answer>2 - 9 = -7, -7 + 5 = -2</answer>", 0.0),
        ("2 - 9 = " + "9" * 5000, 0.0),
        ("", 0.0),
    ],
)
def test_worked_steps(wrapped, text, expected):
    asked = [{"role": "user", "content": "What is 1 + 1?"}, {"role": "user", "content": "What is 2 - 9 + 5?"}]
    assert library.worked_steps(wrapped([text]), prompts=[asked]) == [expected]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("What is 3 + 4 now?", 1.0),
        ("First 9 - 2, then 3 + 4.", 1.0),
        ("What is -3 + 4?", 0.0),
        ("Say 7.", None),
        ("", None),
        ("What is 2 * 3 + 4?", None),
        ("What is (3 + 4) / 7?", None),
        ("What is 2.3 + 4?", None),
        ("What is x + 3 + 4?", None),
    ],
)
def test_a_chain_is_the_whole_of_the_prompts_last_expression(asked, expected):
    assert library.worked_steps(["3 + 4 = 7"], prompts=[asked]) == [expected]


def test_numeric_closeness_is_half_at_its_scale():
    assert library.numeric_closeness(["52", "62"], answer=["42", "42"], scale=10) == [0.5, pytest.approx(1 / 3)]


def test_numeric_tolerance_is_relative_above_one():
    def near(text, answer):
        return library.numeric_match([text], answer=[answer], tolerance=0.01)[0]

    assert [near("1009", 1000), near("1011", 1000), near("0.009", 0), near("0.011", 0)] == [1.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("text", "answer", "expected"), [("Paris\n", "Paris", 1.0), ("paris", "Paris", 0.0), ("Paris", None, None)]
)
def test_exact_match(wrapped, text, answer, expected):
    assert library.exact_match(wrapped([text]), answer=[answer]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<reasoning>\n3+4\n</reasoning>\n<answer>\n7\n</answer>\n", 1.0),
        ("<reasoning>a < b</reasoning><answer>7</answer>", 1.0),
        ("<reasoning>3+4</reasoning><answer>7</answer> done", 0.0),
        ("so <reasoning>3+4</reasoning><answer>7</answer>", 0.0),
        ("<answer>7</answer><reasoning>3+4</reasoning>", 0.0),
        ("<reasoning></reasoning><answer>7</answer>", 0.0),
        ("<reasoning>x</reasoning><answer> </answer>", 0.0),
        ("<reasoning>x</reasoning><answer>7</answer><answer>8</answer>", 0.0),
        ("<reasoning><answer>6</answer></reasoning><answer>7</answer>", 0.0),
        ("<reasoning>x</reasoning>", 0.0),
    ],
)
def test_xml_format(wrapped, text, expected):
    assert library.xml_format(wrapped([text])) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>so</think>7", 1.0),
        ("<think></think> 7", 0.0),
        ("\n<think>a\nb</think>\nc\nd", 1.0),
        ("<think>so</think> ", 0.0),
        ("so <think>x</think> 7", 0.0),
        ("<think>a</think> 7 <think>b</think>", 0.0),
        ("<think>a</think> 7 </think>", 0.0),
        ("<think><think>a</think> 7", 0.0),
        ("<think>a", 0.0),
    ],
)
def test_think_format(wrapped, text, expected):
    assert library.think_format(wrapped([text])) == [expected]


def test_regex_format(wrapped):
    texts = wrapped(["a\nb", " ab ", "abc", "b"])
    assert library.regex_format(texts, pattern="a.*b") == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("name", ["accuracy_reward", "reasoning_accuracy_reward", "get_cosine_scaled_reward"])
def test_trls_rewards_take_both_forms(wrapped, name):
    function = library_reward(name, max_len=10) if name.startswith("get_") else library_reward(name)
    ids = {"completion_ids": [[1] * 5] * 2} if name.startswith("get_") else {}
    rewards = function(completions=wrapped([r"<think>x</think> \boxed{4}", ""]), solution=["4", "4"], **ids)
    assert rewards == ([0.75, -0.75] if name.startswith("get_") else [1.0, 0.0])
    assert library.think_format_reward(wrapped(["<think>x</think>", "x"])) == [1.0, 0.0]


@pytest.mark.parametrize("function", [library.answer_format, library.xml_format, library.think_format])
@pytest.mark.parametrize("text", ["<answer>" * 20_000, "<think>" + "x " * 50_000, "<reasoning>" + " " * 100_000])
def test_long_texts_take_no_time(function, text):
    start = time.process_time()
    function([text])
    assert time.process_time() - start < 2


@pytest.mark.parametrize(
    ("text", "answer", "choices", "expected"),
    [
        ("B", "B", None, 1.0),
        ("(b)", "B", None, 1.0),
        ("**B**", "B", None, 1.0),
        ("B) Paris", "B", None, 0.0),  # nothing says that Paris is its text
        ("I think so.\nAnswer: B", "B", None, 1.0),
        ("The answer is (B).", "B", None, 1.0),
        (r"so \boxed{B}", "B", None, 1.0),
        ("A <answer>B</answer>", "B", None, 1.0),
        ("B", 1, None, 1.0),
        ("A B C D", "B", None, 0.0),
        ("A) B) C) D)", "A", None, 0.0),
        ("A) no B) yes", "A", None, 0.0),
        ("A good answer", "A", None, 0.0),
        ("Because", "B", None, 0.0),
        ("", "B", None, 0.0),
        ("B", None, None, None),
        ("B", "BB", None, None),
        ("B", 30, None, None),
        ("rome.", "B", ["Paris", "Rome"], 1.0),
        ("B. Rome", "Rome", ["Paris", "Rome"], 1.0),
        ("A", "Rome", ["Paris", "Rome"], 0.0),
        ("Paris, Rome", "Rome", ["Paris", "Rome"], 0.0),
        ("A is Rome", "Rome", ["Paris", "Rome"], 0.0),
        ("A = Rome", "Rome", ["Paris", "Rome"], 0.0),
        ("B (Rome)", "Rome", ["Paris", "Rome"], 1.0),
        ("B (Paris)", "Rome", ["Paris", "Rome"], 0.0),
        ("C", "C", ["Paris", "Rome"], None),
        ("3", "3", {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, 1.0),
        ("2", "3", {"text": ["a", "b", "c"], "label": ["1", "2", "3"]}, 0.0),
    ],
)
def test_multiple_choice(wrapped, text, answer, choices, expected):
    columns = {} if choices is None else {"choices": [choices]}
    assert library.multiple_choice(wrapped([text]), answer=[answer], **columns) == [expected]


@pytest.mark.parametrize(
    ("prompt", "text", "expected"),
    [
        ("Which? A) Paris B) Rome", "B) Rome", 1.0),
        ("Which?\nA. Paris\nB. Rome\nC. Oslo", "Rome", 1.0),
        ("Which?\nA. Paris\nB. Rome\nC. Oslo", "B. Oslo", 0.0),
        ([{"role": "user", "content": "Which?\n(A) Paris\n(B) Rome"}], "The answer is (B) Rome.", 1.0),
        ("Is A. Smith right? (A) yes (B) no", "B. no", 1.0),
        ("Which?", "B) Rome", 0.0),
        ("Which?", "B", 1.0),
    ],
)
def test_choices_are_those_that_the_prompt_lists(prompt, text, expected):
    assert library.multiple_choice([text], answer=["B"], prompts=[prompt]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>7</answer> or 8", 1.0),
        (r"so \boxed{7}, I think", 1.0),
        ("#### 7\nThat is all.", 1.0),
        ("Answer: 7\nThat is all.", 1.0),
        ("**Final answer:**\n\n7", 1.0),
        ("3 + 4\nIt's 7!", 1.0),
        ("$$\n7\n$$", 1.0),
        ("<think>8? No.</think>7", 1.0),
        ("8? No.</think>\n7", 1.0),
        ("<think><answer>7</answer></think>8", 0.0),
        ("<think>so it is\n7", 0.0),
        ("<answer>8</answer> 7", 0.0),
        ("Answer: 8\n7", 0.0),
        ("We are left with 7.", 0.0),
        ("7\nOr so.", 0.0),
        ("6\n7", 0.0),
        ("<answer>7", 0.0),
        (r"\boxed{7", 0.0),
    ],
)
def test_the_answer_stands_in_the_first_place_that_there_is(text, expected):
    assert library.numeric_match([text], answer=["7"]) == [expected]
    assert library.numeric_closeness([text], answer=["7"], scale=0.1)[0] == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize(
    ("extract", "text", "expected"),
    [
        ("answer_line", "Answer: 7\nThat is all.", 1.0),
        ("answer_line", "<answer>7</answer>", 0.0),
        ("last_line", "So.\n7", 1.0),
        ("last_line", "7\nSo.", 0.0),
        ("last_number", "it must be 7 of them", 1.0),
        ("text", "The answer is 7.", 1.0),
        ("text", "So.\n7", 0.0),
        ("tag:think", "<think>7</think>8", 1.0),
    ],
)
def test_a_declared_place_is_the_only_one(extract, text, expected):
    assert library.numeric_match([text], answer=["7"], extract=extract) == [expected]


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        ("5000 m", "5 km", 1.0),
        ("5", "5 km", 1.0),
        ("5 km", 5, 1.0),
        ("5 miles", "5 km", 0.0),
        ("5 m", "5 km", 0.0),
        ("5 kg", "5 km", 0.0),
        ("500 cents", "$5", 1.0),
        ("€5", "$5", 0.0),
        ("5 apples", "5 apples", 1.0),
        ("5 pears", "5 apples", 0.0),
        ("36 km/h", "10 m/s", 1.0),
        ("20000 cm^2", "2 square meters", 1.0),
        ("2 cm", "2%", 0.0),
        ("5 pm", "5 pm", 1.0),
    ],
)
def test_units_are_compared_where_both_have_one(text, answer, expected):
    assert library.numeric_match([text], answer=[answer]) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<reasoning>so</reasoning>\n<answer>7</answer>", 1.0),
        ("<reasoning>so</reasoning><answer>7</answer>" + "x" * 100, 0.9),
        ("<reasoning>so</reasoning><answer>7</answer>" + "x" * 9999, 0.0),
        ("<reasoning>so</reasoning><answer>7", 0.75),
        ("<answer>7</answer><reasoning>so</reasoning>", 0.5),
        ("<answer>" * 50, 0.0),
        ("<reasoning></reasoning>" * 50 + "<answer></answer>", 0.5),
        ("", 0.0),
    ],
)
def test_xml_format_partial(wrapped, text, expected):
    assert library.xml_format_partial(wrapped([text])) == [pytest.approx(expected)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{}", 1.0),
        (" [1, 2.5e3, null]\n", 1.0),
        ("7", 1.0),
        ("```json\n{}\n```", 1.0),
        ("```\n{}\n```", 1.0),
        ("Here: ```json\n{}\n```", 0.0),
        ("{'a': 1}", 0.0),
        ("{} {}", 0.0),
        ("NaN", 0.0),
        ("-Infinity", 0.0),
        ("", 0.0),
        ("[" * 100_000, 0.0),
        ("9" * 5000, 0.0),  # more digits than Python reads
    ],
)
def test_json_format(wrapped, text, expected):
    assert library.json_format(wrapped([text])) == [expected]


def test_json_format_without_fences():
    assert library.json_format(["```json\n{}\n```", "{}"], fenced=False) == [0.0, 1.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "Ana", "age": 41, "tall": true}', 1.0),
        ('```json\n{"age": 41.0, "tall": true, "name": "Ana"}\n```', 1.0),
        ('{"name": " Ana", "age": 41, "tall": true}', 2 / 3),  # another text to the program that reads it
        ('{"name": "Ana", "age": "41", "tall": 1}', 1 / 3),
        ('{"name": "ana"}', 0.0),
        ('{"name": "Ana", "age": 41, "tall": true, "extra": 0}', 3 / 4),
        ('{"name": "Ana", "age": 41, "tall": true} and so on', 0.0),
        ("[41]", 0.0),
        ("{}", 0.0),
    ],
)
def test_json_match(wrapped, text, expected):
    gold = {"name": "Ana", "age": 41, "tall": True}
    assert library.json_match(wrapped([text] * 2), answer=[gold, json.dumps(gold)]) == pytest.approx([expected] * 2)
    assert library.json_match(wrapped([text] * 3), answer=["41", None, "{}"]) == [None, None, None]


def test_json_match_takes_a_null_field_for_one_that_is_not_there(tmp_path):
    """A typed column has the fields of all rows, null where a row lacks one: the row's own object is right."""
    rows = [{"q": "Ana", "a": {"name": "Ana"}}, {"q": "Ben, 41", "a": {"name": "Ben", "at": {"age": 41}}}]
    file = tmp_path / "people.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    loaded, _ = load(str(file), prompt="{q}", answer="{a}")
    texts = [json.dumps(row["a"]) for row in rows]
    assert library.json_match(texts, answer=list(loaded["answer"])) == [1.0, 1.0]
    assert library.json_match(['{"name": null}'], answer=[{"name": "Ana", "age": None}]) == [0.0]
    assert library.json_match(['{"age": null}', "{}", '{"age": 1}'], answer=['{"age": null}'] * 3) == [1.0, 1.0, 0.0]


TREE = {"$ref": "#/$defs/node", "$defs": {"node": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}


def test_json_schema(wrapped):
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"enum": [1, 2]}}, "additionalProperties": False}
    texts = wrapped(['{"a": 1}', '{"a": 3}', '{"a": 1, "b": 2}', "{", "{}"])
    assert library.json_schema(texts, schema=schema, parses=0.2) == [1.0, 0.2, 0.2, 0.0, 0.2]
    assert library.json_schema(wrapped(["[[], [[]]]", "[1]", "[" * 900 + "]" * 900]), schema=TREE)[:2] == [1.0, 0.0]


@pytest.fixture
def schema_server():
    """Serves a schema that everything fits, and counts how often."""

    class Handler(http.server.BaseHTTPRequestHandler):
        asked = 0

        def do_GET(self):
            Handler.asked += 1
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"{}")

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/other.json", Handler
        server.shutdown()


def test_no_schema_is_fetched(schema_server, tmp_path):
    url, handler = schema_server
    (tmp_path / "other.json").write_text("{}")
    for reference in (url, (tmp_path / "other.json").as_uri(), "other.json"):
        with pytest.raises(ConfigError, match=r"nothing is fetched"):
            library.json_schema(["{}"], schema={"$ref": reference})
    assert handler.asked == 0


@pytest.mark.parametrize("schema", [{"type": "objekt"}, "object", {"properties": 3}])
def test_what_is_no_schema(schema):
    with pytest.raises(ConfigError, match="`schema`"):
        library_reward("json_schema", schema=schema)


def test_lengths():
    lengths = [[1] * count for count in (1, 50, 100, 150, 10_000)]
    assert library.ideal_length(lengths, tokens=100, width=100) == [pytest.approx(0.01), 0.5, 1.0, 0.5, 0.0]
    assert library.token_budget(lengths, tokens=100, slack=1) == [1.0, 1.0, 1.0, 0.5, 0.0]
    assert library.token_budget(lengths, budget=[1, 25, None, 300, 1]) == [1.0, 0.0, None, 1.0, 0.0]


# --- formulas --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "answer", "expected"),
    [
        (r"\boxed{\frac{3}{4}}", "0.75", 1.0),
        (r"\boxed{3/4}", r"\frac{3}{4}", 1.0),
        (r"\boxed{(x+1)^2}", "x^2+2x+1", 1.0),
        (r"\boxed{$7$}", 7, 1.0),
        (r"\boxed{8} no, \boxed{7}", "7", 1.0),
        (r"\boxed{7} no, \boxed{8}", "7", 0.0),
        (r"\boxed{}", "7", 0.0),
        ("7", "7", 0.0),
        (r"\boxed{7}", r"So $x$ is \boxed{7}.", 1.0),
        (r"\boxed{24}", "48/2 = 24\n#### 24", 1.0),
        (r"\boxed{2wxyz}", "2xyzw", 1.0),
        (r"\boxed{\angle ABC = 7^\circ}", "7", 1.0),
        (r"\boxed{(x, y) = (2,3)}", "(2, 3)", 1.0),
        (r"\boxed{x = 2 \text{ or } x = 3}", "2, 3", 1.0),
        (r"\boxed{7\,\pi}", r"7\pi", 1.0),
        (r"\boxed{7;7}", "7", 0.0),
        (r"\boxed{2x = 7}", "7", 0.0),
        (r"\boxed{\text{maybe } 7}", "7", 0.0),
        (r"\boxed{" + "(" * 20_000 + "7" + ")" * 20_000 + "}", "7", 0.0),
        (r"\boxed{7}", None, None),
        (r"\boxed{7}", "", None),
    ],
)
def test_math_match(wrapped, text, answer, expected):
    assert library.math_match(wrapped([text]), answer=[answer]) == [expected]


HOSTILE = [r"\boxed{9^{9^{9^{9}}}}", r"\boxed{(10^{10^{10}})!}", r"\boxed{" + "(" * 2000 + "4" + ")" * 2000 + "}"]


@pytest.mark.slow
def test_formulas_that_never_end_are_killed_and_the_rest_goes_on():
    """In another thread than the main one, where an alarm of Python's would not even be allowed."""
    texts = [r"\boxed{4}", *HOSTILE, r"\boxed{8/2}", r"\boxed{5}"]
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(library.math_match, texts, answer=["4"] * len(texts), timeout_seconds=1)
        assert asked.result() == [1.0, 0.0, 0.0, 0.0, 1.0, 0.0]
    assert time.perf_counter() - start < 20
    assert library.math_match([r"\boxed{4}"], answer=["4"]) == [1.0]


@pytest.mark.slow
def test_a_gold_that_never_ends_is_no_opinion_and_tried_once():
    gold = HOSTILE[1]
    start = time.perf_counter()
    found = library.math_match([rf"\boxed{{{n}}}" for n in range(20)], answer=[gold] * 19 + ["19"], timeout_seconds=1)
    assert found == [None] * 19 + [1.0]
    assert time.perf_counter() - start < 15


def test_what_was_understood_is_logged():
    columns = {}
    texts = [r"\boxed{1/2}", "nothing", r"\boxed{(10^{10^{10}})!}"]
    library.math_match(texts, answer=["0.5", "1", "1"], log_extra=columns.__setitem__, timeout_seconds=1)
    assert columns["solution"] == ["0.5", "1", "1"]
    assert columns["answer_parsed"][1:] == ["[no answer]", "[took too long]"]
    assert "1/2" in columns["answer_parsed"][0]


def test_a_worker_has_no_secrets(monkeypatch):
    monkeypatch.setenv("CANARY_TOKEN", "canary-7")
    worker = mathematics._MAKE()
    worker.start()
    try:
        environment = Path(f"/proc/{worker.process.pid}/environ")
        if environment.exists():
            assert b"canary-7" not in environment.read_bytes()
    finally:
        worker.kill()


# --- by name ---------------------------------------------------------------------------------------------------------


def test_settings_by_name_are_used():
    assert library_reward("regex_format", pattern="a+")(completions=["aa", "b"]) == [1.0, 0.0]
    assert library_reward("xml_format", sections=["a"])(completions=["<a>x</a>"]) == [1.0]
    assert library_reward("get_soft_overlong_punishment", max_completion_len=4, soft_punish_cache=2)(
        completion_ids=[[1] * 3]
    ) == [-0.5]
    assert library_reward("reward_model", model="org/judge").__name__ == "judge"
    assert library_reward("answer_correct") is library.answer_correct


@pytest.mark.parametrize(
    ("name", "settings", "text"),
    [
        ("anser_format", {}, "Did you mean `answer_format`"),
        ("regex_format", {"patern": "x"}, r"no setting `patern`(.|\n)*fix: Did you mean `pattern`"),
        ("regex_format", {}, "`regex_format` needs `pattern`"),
        ("answer_format", {"answer": "x"}, "takes no settings"),
        ("get_cosine_scaled_reward", {}, "needs `max_len`"),
        ("exact_match", {"extract": "boxd"}, r"no way `boxd` to extract an answer(.|\n)*fix: Did you mean `boxed`"),
        ("exact_match", {"extract": "regex:("}, "is no regular expression"),
        ("exact_match", {"extract": "after"}, "needs something after the colon"),
        ("exact_match", {"extract": []}, "empty list"),
        ("regex_format", {"pattern": "(a"}, "is no regular expression"),
        ("numeric_match", {"tolerance": -1}, "`tolerance` must be 0 or more"),
        ("numeric_closeness", {"scale": 0}, "`scale` must be above 0"),
        ("numeric_match", {"tolerance": "much"}, "`numeric_match` cannot work with these settings"),
        ("xml_format", {"sections": "answer"}, "`sections` must be a list"),
        ("ideal_length", {"tokens": 0}, "1 or more"),
    ],
)
def test_wrong_names_and_settings(name, settings, text):
    with pytest.raises(ConfigError, match=text):
        library_reward(name, **settings)


def test_through_the_boundary():
    texts = ["<answer>7</answer>", "<answer>8</answer>", "7"]
    completions = tuple(
        Completion(token_ids=(1,), logps=(0.0,), finish="stop", text=text, policy_step=0) for text in texts
    )
    prompt = Prompt(id=0, row=0, token_ids=(1,), text="", content="3+4=", columns={"answer": "7"})
    functions = [library_reward(name) for name in ("answer_correct", "answer_format", "exact_match", "numeric_match")]
    rewards = resolve_rewards(functions)
    check_rewards(rewards, ["prompt", "answer"])
    (scored,) = score([Group(prompt=prompt, completions=completions)], rewards)
    assert scored.rewards_GK.tolist() == [[1, 1, 0, 1], [0, 1, 0, 0], [0, 0, 1, 1]]


def test_the_library_is_light():
    heavy = "import sys, podium.rewards; print([m for m in ('torch', 'transformers', 'trl') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", heavy], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
