"""Settings changed in the text of a recipe."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from podium.errors import ConfigError
from podium.errors.texts import as_yaml
from podium.recipe.changes import apply_changes, differences
from podium.recipe.document import parse
from podium.testing import save_tiny_model

RECIPE = """\
# my recipe
model: builtin:smollm2-135m-instruct  # small
temperature: 1.45  # hot
min_p: 0.1

rewards:
  - answer_correct
  - name: exact_match
    weight: 2   # two
model_init_kwargs:
  # inside
  attn_implementation: eager
on_finding: {M132: stop}  # one line
system: |
  Hello
  there

# the last
examples:
  - question: "1+1"
    answer: "2"
seed: 3"""


def test_a_value_is_replaced_in_its_line_and_all_else_stays() -> None:
    assert apply_changes(RECIPE, {"temperature": 1.0}) == RECIPE.replace("1.45  # hot", "1.0  # hot")


def test_a_key_is_taken_out_with_its_line() -> None:
    assert apply_changes(RECIPE, {"min_p": None, "beta": None}) == RECIPE.replace("min_p: 0.1\n", "")


def test_a_new_key_stands_at_the_end() -> None:
    assert apply_changes(RECIPE, {"beta": 0.04}) == f"{RECIPE}\nbeta: 0.04\n"


def test_nested_keys() -> None:
    made = apply_changes(RECIPE, {"model_init_kwargs.dtype": "float32", "on_finding": {"M101": "stop"}})
    assert "  # inside\n  attn_implementation: eager\n  dtype: float32\non_finding" in made
    assert "on_finding: {M132: stop, M101: stop}  # one line\n" in made
    assert apply_changes(RECIPE, {"model_init_kwargs.attn_implementation": None}).count("model_init_kwargs") == 0


def test_lists_of_mappings_have_a_line_for_each() -> None:
    made = apply_changes(
        RECIPE, {"examples": [{"question": "a # b: c", "answer": "no"}, {"question": "2", "answer": "3"}]}
    )
    assert 'examples:\n  - {question: "a # b: c", answer: "no"}\n  - {question: "2", answer: "3"}\nseed: 3' in made
    assert "# the last\n" in made


def test_the_argument_in_generation_kwargs_would_count() -> None:
    made = apply_changes("generation_kwargs:\n  temperature: 0.1\n  top_k: 3  # few\n", {"temperature": 1.0})
    assert made == "generation_kwargs:\n  top_k: 3  # few\ntemperature: 1.0\n"
    assert "generation_kwargs" not in apply_changes("generation_kwargs: {temperature: 0.1}", {"temperature": 1.0})


def test_the_spelling_of_trl_and_the_stages_are_found() -> None:
    assert apply_changes("model_name_or_path: a/b\n", {"model": "c/d"}) == 'model_name_or_path: "c/d"\n'.replace(
        '"', ""
    )
    stages = "stages:\n  - name: a\n    beta: 0.5  # here\n  - name: b\n"
    assert apply_changes(stages, {"beta": 0.1}) == stages.replace("0.5", "0.1") + "beta: 0.1\n"


def test_comments_are_lost_before_values_are() -> None:
    anchored = "model: &m a  # base\nsystem: *m\n"
    assert parse(apply_changes(anchored, {"model": "b"}), name="r").values == {"model": "b", "system": "a"}


@pytest.mark.parametrize(
    ("changes", "code"),
    [({"temprature": 1}, "C001"), ({"temperature": "hot"}, "C003"), ({"num_generations": 2.5}, "C002")],
)
def test_unknown_keys_and_wrong_values_are_refused(changes: dict[str, object], code: str) -> None:
    with pytest.raises(ConfigError) as error:
        apply_changes(RECIPE, changes)
    assert error.value.code == code


def test_an_action_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be one of stop"):
        apply_changes(RECIPE, {"on_finding.M101": "halt"})


def test_differences_leave_out_what_is_so_already() -> None:
    found = differences(RECIPE, {"temperature": 1.0, "seed": 3, "min_p": None, "beta": None, "on_finding.M101": "stop"})
    assert list(map(str, found)) == [
        "temperature: 1.45 -> 1.0",
        "min_p: 0.1 -> not set",
        "on_finding.M101: not set -> stop",
    ]


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(PLAIN)
@example({"\xa0": None})
def test_values_in_one_line_are_read_back(value: object) -> None:
    line = as_yaml(value)
    assert "\n" not in line
    assert parse(f"system: {line}\n", name="r").values == {"system": value}


@settings(max_examples=40)
@given(
    st.dictionaries(st.sampled_from(("temperature", "beta", "min_p", "top_p")), st.floats(0.01, 1) | st.none()),
    st.text(max_size=30),
)
def test_the_result_has_the_old_values_and_the_changes(changes: dict[str, float | None], words: str) -> None:
    made = parse(apply_changes(RECIPE, {**changes, "system": words}), name="r").values
    wanted = {**parse(RECIPE, name="r").values, **changes, "system": words}
    assert made == {key: value for key, value in wanted.items() if value is not None}


ROWS = "".join(f'{{"question": "{a} plus {a + 1}?", "answer": "{2 * a + 1}"}}\n' for a in range(60))


def test_a_number_of_examples_takes_rows_and_leaves_them_out(tmp_path) -> None:
    from podium.recipe import load

    (tmp_path / "rows.jsonl").write_text(ROWS)
    recipe = tmp_path / "run.yaml"
    text = f'model: builtin:smollm2-135m-instruct\ndataset: {tmp_path}/rows.jsonl\nprompt: "{{question}}"\n'
    text += "held_out: 0.2\nrewards: [answer_correct]\n"
    recipe.write_text(text)
    before = load(recipe).load_rows()
    recipe.write_text(apply_changes(text, {"examples": 2}))
    made, again = load(recipe), load(recipe)
    examples = made.data.columns.examples
    assert examples == again.data.columns.examples == tuple(made.given["examples"])
    assert len({each["answer"] for each in examples}) == 2
    assert all(each["answer"].startswith("<answer>") for each in examples)
    after = made.load_rows()
    asked = {each["question"] for each in examples}
    assert set(before.train["question"]) - set(after.train["question"]) == asked
    assert before.held_out["question"] == after.held_out["question"]
    assert "examples: 2" not in apply_changes('examples: [{question: "1", answer: "2"}]', {"examples": 2})


def test_cure_writes_a_recipe_beside_the_first_and_overwrites_nothing(tmp_path, monkeypatch) -> None:
    from typer.testing import CliRunner

    from podium.cli import app
    from podium.recipe.document import read_document

    folder = tmp_path / "mine"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    (folder / "f.py").write_text("def right(completions, answer):\n    return [0.0 for _ in completions]\n")
    (folder / "rows.jsonl").write_text(ROWS)
    save_tiny_model(folder / "model")
    text = '# mine\nmodel: ./mine/model\ndataset: mine/rows.jsonl\nprompt: "{question}"\n'
    text += "rewards: [f.py:right]\ntemperature: 0.1  # cold\nmax_steps: 3\nper_device_train_batch_size: 16\n"
    (folder / "run.yaml").write_text(text)
    run = CliRunner().invoke(app, ["cure", "mine/run.yaml", "--dry-run"])
    assert run.exit_code == 0, run.output
    assert "temperature: 0.1 -> 1" in run.output
    assert not list(tmp_path.rglob("*.cured*"))
    for name in ("run.cured.yaml", "run.cured2.yaml"):
        run = CliRunner().invoke(app, ["cure", "mine/run.yaml"])
        assert run.exit_code == 0, run.output
        made = (folder / name).read_text()
        assert made.startswith("# mine\n")
        assert "temperature: 1.0  # cold\n" in made
    assert (folder / "run.yaml").read_text() == text
    run = CliRunner().invoke(app, ["cure", "mine/run.yaml", "--out", "other.yaml"])
    assert run.exit_code == 0, run.output
    assert read_document(tmp_path / "other.yaml", "other.yaml").values["rewards"] == ["mine/f.py:right"]
    assert CliRunner().invoke(app, ["cure", "mine/run.yaml", "--out", "other.yaml"]).exit_code == 2
    assert CliRunner().invoke(app, ["cure", "mine/run.yaml", "--codes", "M999"]).exit_code == 2


def test_cure_applies_notes_only_where_they_are_named(tmp_path, monkeypatch) -> None:
    from typer.testing import CliRunner

    from podium.cli import app

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    findings = [
        {"code": "M191", "severity": "warning", "what": "w", "why": "", "fix": "", "changes": {"temperature": 1.0}},
        {"code": "K002", "severity": "note", "what": "n", "why": "", "fix": "", "changes": {"beta": 0.04}},
    ]
    (folder / "findings.jsonl").write_text("".join(json.dumps({**each, "step": 1}) + "\n" for each in findings))
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 0, "values": {"reward": 0.5}}\n')
    (folder / "config.yaml").write_text("dataset: a.csv\ntemperature: 1.5\noutput_dir: runs/a\n")
    for codes, changed, left in (((), "temperature", "beta"), (("--codes", "K002"), "beta", "temperature")):
        run = CliRunner().invoke(app, ["cure", "runs/a", "--dry-run", *codes])
        assert run.exit_code == 0, run.output
        assert f"  {changed}: " in run.output
        assert f"  {left}: " not in run.output
    assert "Not applied without --codes: K002." in CliRunner().invoke(app, ["cure", "runs/a", "--out", "b.yaml"]).output
    assert (tmp_path / "b.yaml").read_text() == "dataset: a.csv\ntemperature: 1.0\noutput_dir: runs/a-cured\n"
