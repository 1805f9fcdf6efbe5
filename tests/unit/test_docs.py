"""The documentation says what is in the code: tables are equal to it, links resolve, examples run.

Where a table is out of date, the test that fails shows the text to put between its marks.
"""

from __future__ import annotations

import dataclasses
import doctest
import importlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trl
import yaml
from typer.core import TyperGroup
from typer.main import get_command

import podium
from podium.algorithm.losses import OBJECTIVES
from podium.algorithm.metrics import METRICS
from podium.cli import app
from podium.errors import ConfigError
from podium.recipe import load
from podium.recipe.schema import key_types
from podium.rewards import LIBRARY
from podium.rewards.resolve import resolve_rewards
from podium.runs.findings import codes
from podium.runs.monitors import DETECTORS
from podium.tester import episodes, truth
from podium.tester.calls import LocalCaller
from podium.tester.policies import noise
from podium.tester.rewards import ExamineSettings, examine_resolved
from podium.trainer.attributes import HOOKS, NOT_HERE
from podium.trainer.config import GRPOConfig
from podium.trainer.rules import REFUSED

ROOT = Path(__file__).parents[2]
PACKAGE = Path(podium.__file__).parent
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCS = [
    ROOT / "README.md",
    ROOT / "SKILL.md",
    ROOT / "benchmarks" / "RESULTS.md",
    ROOT / "tests" / "parity" / "TRL.md",
    *PAGES,
]
BY_NAME = {page.name: page.read_text(encoding="utf-8") for page in DOCS}


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, ("---",) * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" if line[0] != "---" else f"|{'|'.join(line)}|" for line in lines)


def marked(page: str, mark: str) -> str:
    """What stands between `<!-- mark -->` and `<!-- /mark -->`."""
    found = re.search(rf"<!-- {mark} -->\n(.*?)\n?<!-- /{mark} -->", BY_NAME[page], re.DOTALL)
    assert found, f"{page} has no marks `{mark}`"
    return found[1]


def code_blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", BY_NAME[page], re.DOTALL | re.MULTILINE)


# ---- tables that repeat the code ----


def refused_fields() -> str:
    rows = [(f"`{name}`", f"`{idle!r}`", reason) for name, (idle, reason) in REFUSED.items()]
    return table(("field", "default", "why"), rows)


def vllm_fields() -> set[str]:
    names = {field.name for field in dataclasses.fields(GRPOConfig)}
    return {name for name in names if name.startswith("vllm_")} - set(REFUSED)


def spelt(command: Any, name: str) -> list[tuple[str, Any]]:
    """A command and all below it, as they are typed."""
    if not isinstance(command, TyperGroup):
        return [(name, command)]
    return [
        each
        for below, child in command.commands.items()
        if not child.hidden
        for each in spelt(child, f"{name} {below}")
    ]


def commands() -> str:
    rows = []
    for name, command in spelt(get_command(app), "podium"):
        has_json = any("--json" in parameter.opts for parameter in command.params)
        rows.append((f"`{name}`", (command.help or "").split("\n\n")[0].replace("\n", " "), "yes" if has_json else ""))
    return table(("command", "what it does", "`--json`"), rows)


@pytest.mark.parametrize(
    ("page", "mark", "expected"),
    [
        ("recipes.md", "commands", commands()),
        ("TRL.md", "hooks", table(("method", "in its place"), [(f"`{name}`", x) for name, x in HOOKS.items()])),
        ("trl.md", "refused", refused_fields()),
    ],
)
def test_table_repeats_the_code(page: str, mark: str, expected: str) -> None:
    assert marked(page, mark) == expected


def test_every_metric_has_its_unit_in_one_row() -> None:
    rows = re.findall(r"^\| (`.+`) \| (\S+) \| .+ \|$", marked("algorithm.md", "metrics"), re.MULTILINE)
    listed = [(name, unit) for names, unit in rows for name in re.findall(r"`([^`]+)`", names)]
    assert sorted(listed) == sorted((name, each.unit) for name, each in METRICS.items())


def test_fields_of_vllm_are_listed() -> None:
    own = BY_NAME["trl.md"].split("## Keys of TRL")[0]
    listed = set(re.findall(r"`(vllm_\w+)`", own)) - set(REFUSED) - set(NOT_HERE)
    if trl.__version__.startswith("1.16."):
        assert listed == vllm_fields()
    else:  # newer ones may have more
        assert listed


OTHER = {
    bool: lambda idle: not idle,
    str: lambda idle: f"{idle}x",
    int: lambda idle: idle + 1,
    float: lambda idle: idle + 1,
}


@pytest.mark.parametrize("name", [*REFUSED, *sorted(vllm_fields())])
def test_what_is_listed_as_refused_is_refused(name: str, tmp_path: Path) -> None:
    idle = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}[name]
    other = OTHER[type(idle)](idle) if idle is not None else 3
    with pytest.raises(ConfigError, match=name):
        GRPOConfig(output_dir=str(tmp_path), **{name: other})


def test_every_loss_has_a_row() -> None:
    losses = BY_NAME["algorithm.md"].split("## Losses")[1].split("## KL")[0]
    head, *rows = re.findall(r"^\| `(\w+)`", losses, re.MULTILINE)
    assert head == "loss_type"
    assert rows == list(OBJECTIVES)


def test_every_field_of_ours_and_every_other_default_is_listed() -> None:
    theirs = {field.name: field.default for field in dataclasses.fields(trl.GRPOConfig)}
    arguments = BY_NAME["trl.md"].split("## Arguments")[1].split("## Refused")[0]
    for field in dataclasses.fields(GRPOConfig):
        if field.name not in theirs:
            shown = field.default if isinstance(field.default, str) else str(field.default)
            assert re.search(rf"^\| `{field.name}` \| `?{shown}`? \|", arguments, re.MULTILINE), field.name
        elif field.default != theirs[field.name]:
            assert f"| `{field.name}` | {theirs[field.name]} | {field.default}" in arguments, field.name


# ---- links, code, commands ----


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", BY_NAME[page.name])
    assert links
    for link in links:
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), f"{page.name} links to {link}"


@pytest.mark.parametrize("page", BY_NAME)
def test_examples_with_a_prompt_run(page: str) -> None:
    runner, parser = doctest.DocTestRunner(), doctest.DocTestParser()
    said: list[str] = []
    for number, block in enumerate(code_blocks(page, "pycon")):
        if "reasoning_gym" in block and importlib.util.find_spec("reasoning_gym") is None:
            continue  # it needs a C compiler to install
        runner.run(parser.get_doctest(block, {}, f"{page}[{number}]", page, 0), out=said.append)
    assert not runner.failures, "".join(said)
    assert runner.tries or not code_blocks(page, "pycon")


def test_the_drop_in_example_builds_everything_but_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the README's script runs, up to the name of a model that is not here."""
    [block] = code_blocks("README.md", "python")
    monkeypatch.chdir(tmp_path)
    missing = tmp_path / "not-here"
    with pytest.raises(podium.errors.ModelError, match="not-here"):
        exec(block.replace("Qwen/Qwen2.5-0.5B-Instruct", str(missing)), {})


def test_the_recipe_in_the_readme_is_one(tmp_path: Path) -> None:
    [block] = code_blocks("README.md", "yaml")
    (tmp_path / "rewards.py").write_text("def correct(completions, answer):\n    return [0.0] * len(completions)\n")
    (tmp_path / "run.yaml").write_text(block)
    recipe = load(tmp_path / "run.yaml")
    assert [spec.name for spec in recipe.rewards] == ["answer_format", "rewards.py:correct"]
    assert recipe.arguments().num_generations == yaml.safe_load(block)["num_generations"]


def verbs() -> set[str]:
    single = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    return single | {group.name for group in app.registered_groups if group.name}


@pytest.mark.parametrize("page", BY_NAME)
def test_commands_exist(page: str) -> None:
    code = "\n".join(
        [*re.findall(r"`([^`\n]+)`", BY_NAME[page]), *re.findall(r"^ {4}\S.*$|^podium .*$", BY_NAME[page], re.M)]
    )
    named = set(re.findall(r"(?:^|\s)podium (\w+)", code))
    assert named <= verbs()
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|\s)make ([a-z-]+)", code)) <= targets


FLAG = re.compile(r"(?<!\S)(--?[a-zA-Z][\w-]*)")


@pytest.mark.parametrize("page", BY_NAME)
def test_flags_exist(page: str) -> None:
    """Of each command in code: an option of the verb, or a key of a recipe where the verb takes those."""
    text = BY_NAME[page].replace("\\\n", " ")
    known = dict(spelt(get_command(app), "podium"))
    for line in [*re.findall(r"`(podium [^`\n]+)`", text), *re.findall(r"^ *(?:\$ )?(podium .+)$", text, re.MULTILINE)]:
        command = re.split(r"\s(?:[|;#>]|&&|--\s)|\$\(", line)[0]
        verb = next((name for name in known if command.startswith((f"{name} ", f"{name}\n"))), None)
        if verb is None:
            continue
        spellings = ((*each.opts, *each.secondary_opts) for each in known[verb].params)
        options = {spelling for each in spellings for spelling in each} | {"--help"}
        if known[verb].context_settings.get("ignore_unknown_options"):
            options |= {f"--{key}" for key in key_types()}
        assert set(FLAG.findall(command)) <= options, line


def test_the_readme_leads_to_every_verb() -> None:
    named = set(re.findall(r"^podium (\w+)", BY_NAME["README.md"], re.MULTILINE))
    assert named <= verbs()
    assert "docs/recipes.md#commands" in BY_NAME["README.md"]


def test_there_are_fourteen_pages(record_property: Callable[[str, object], None]) -> None:
    """Their words are a reading, never a limit: `pytest --junitxml` has them."""
    assert len(PAGES) == 14
    for page in PAGES:
        record_property(page.name, len(BY_NAME[page.name].split()))


def test_pages_that_code_names_are_there() -> None:
    """Also their anchors, in whatever file of the repository: messages, docstrings, recipes, tests, the Makefile."""
    kinds = (".py", ".md", ".yaml", ".j2", ".toml", ".ipynb")
    folders = [ROOT / name for name in ("src", "tests", "benchmarks", "examples", "website")]
    files = [file for folder in folders for file in folder.rglob("*") if file.suffix in kinds]
    files += [*ROOT.glob("*.md"), ROOT / "Makefile"]
    wrong = [
        f"{file.relative_to(ROOT)} names docs/{page}{anchor}"
        for file in files
        for page, anchor in re.findall(r"docs/([\w-]+\.md)(#[\w-]+)?", file.read_text(encoding="utf-8"))
        if page not in BY_NAME or (anchor and anchor[1:] not in anchors(BY_NAME[page]))
    ]
    assert not wrong


def test_every_page_is_in_the_list_of_pages() -> None:
    listed = re.findall(r"\]\(([\w-]+\.md)\)", BY_NAME["start.md"].split("## Where to read on")[1])
    assert {*listed, "start.md"} == {page.name for page in PAGES}


def test_every_reward_of_the_library_is_on_its_page() -> None:
    part = BY_NAME["rewards.md"].split("## The library")[1].split("### ")[0]
    rows = re.findall(r"^\|.*", part, re.MULTILINE)
    named = re.findall(r"`(\w+)`", "\n".join(rows))
    assert sorted(named) == sorted(LIBRARY)


@pytest.mark.parametrize("page", BY_NAME)
def test_json_is_only_promised_where_it_is(page: str) -> None:
    has_json = set(re.findall(r"^\| `podium ([\w ]+)` .*\| yes \|$", commands(), re.MULTILINE))
    for verb in re.findall(r"podium ((?:rewards |environments |agents )?\w+)[^`\n]*--json", BY_NAME[page]):
        assert verb in has_json, f"{page}: podium {verb} --json"


def test_the_skill_says_what_every_family_of_findings_asks_for() -> None:
    """Each code is in one row of the table, and no row is empty."""
    table = BY_NAME["SKILL.md"].split("## What the findings ask for")[1]
    rows = re.findall(r"^\| ([A-Z]\d*)(?: to ([A-Z]\d+))? \|", table, re.MULTILINE)
    ranges = [(low, high or low + "\uffff") for low, high in rows]
    found = [[code for code in codes() if low <= code <= high] for low, high in ranges]
    assert all(found), "a row without a code"
    assert sorted(code for row in found for code in row) == sorted(codes())


@pytest.mark.defect("OTskill", "SKILL.md: front matter")
def test_the_front_matter_of_the_skill_is_yaml() -> None:
    """As programs that load skills read it: two lines of dashes, and plain keys between them."""
    before, front, rest = re.split(r"^---$", BY_NAME["SKILL.md"], maxsplit=2, flags=re.MULTILINE)
    assert (before, rest[:4]) == ("", "\n\n# ")
    matter = yaml.safe_load(front)
    assert matter.keys() == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9-]{1,64}", matter["name"])
    assert 0 < len(matter["description"]) <= 1024


@pytest.mark.defect("OTskill", "SKILL.md: settings by model and memory")
def test_the_settings_of_the_skill_are_those_of_recipes_and_of_the_table_of_sizes() -> None:
    rows = re.findall(
        r"^\| ([\d.]+B) \| (.+?) \| (\d+) GB(.*?) \| (\S+) \| (.+) \|$", BY_NAME["SKILL.md"], re.MULTILINE
    )
    assert len(rows) == 8
    for size, how, memory, each, rate, begin in rows:
        recipe = re.fullmatch(r"`([\w.-]+)`", begin)
        if recipe is None:  # from the table of estimated peaks; `on each of 8` is its column of FSDP2
            cells = next(line for line in BY_NAME["scale.md"].splitlines() if line.startswith(f"| {size} | {how}"))
            assert cells.split("|")[5 if each else 3].strip() == memory, (size, how)
            continue
        text = (PACKAGE / "recipe" / "recipes" / f"{recipe[1]}.yaml").read_text()
        assert "a GPU with" not in text or f"a GPU with {memory} GB" in text
        assert float(yaml.safe_load(text)["learning_rate"]) == float(rate)
        assert ("lora" in yaml.safe_load(text)) == ("LoRA" in how)


def test_the_number_of_detectors_is_that_of_the_table() -> None:
    said = {name: re.findall(r"(\w+) detectors (?:watch|look|and ranks)", text) for name, text in BY_NAME.items()}
    said = {name: numbers for name, numbers in said.items() if numbers}
    assert set(said) == {"README.md", "guide.md", "health.md"}
    assert {number for numbers in said.values() for number in numbers} == {str(len(DETECTORS))}


def test_every_good_word_has_a_test_in_which_it_is_not_said() -> None:
    rows = marked("RESULTS.md", "good words").splitlines()[2:]
    assert len(rows) >= 18
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)::(test_\w+)`", row)
        assert named, row
        for file, name in named:
            assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(encoding="utf-8"), (file, name)


def examples_of(module: str) -> str:
    """The indented lines of a module's docstring, or those that begin with code."""
    text = importlib.import_module(module).__doc__ or ""
    return "\n".join(
        line.strip() for line in text.splitlines() if re.match(r"\s*(\w+(, \w+)* = |print\(|play\.)", line)
    )


@pytest.mark.defect("OTpages", "examples in docstrings of modules")
def test_examples_in_docstrings_of_the_testers_run(capsys: pytest.CaptureFixture[str]) -> None:
    class Guess(podium.TextEnvironment):
        def reset(self, number: int, **row: Any) -> str:
            self.number = number
            return "Guess."

        def step(self, text: str) -> tuple[str | None, float, bool, dict[str, Any]]:
            return "No.", 0.0, text == str(self.number), {}

    exec(examples_of(episodes.__name__), names := {**vars(episodes), "noise": noise, "Guess": Guess})
    assert len(names["play"].events) == 8

    [reward] = resolve_rewards([LIBRARY["exact_match"]])
    rows = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(8)]
    report = examine_resolved(reward, rows, 1.0, ExamineSettings())
    subject = truth.Subject(caller=LocalCaller(reward, 5.0), name="f", weight=1.0, report=report)
    exec(examples_of(truth.__name__), {**vars(truth), "subjects": [subject], "rows": rows})
    assert capsys.readouterr().out.startswith("mean score of 8 rows")


@pytest.mark.defect("OTpages", "who reads the whole config")
def test_the_packages_that_read_the_whole_config_are_those_of_the_page() -> None:
    readers = {
        path.relative_to(PACKAGE).parts[0]
        for path in PACKAGE.glob("*/**/*.py")
        if "podium.trainer.config import" in path.read_text(encoding="utf-8")
    }
    [told] = re.findall(r"((?:`\w+`,?\s(?:and\s)?)+)read\s+the\s+whole\s+config", BY_NAME["architecture.md"])
    assert set(re.findall(r"`(\w+)`", told)) == readers


@pytest.mark.defect("OTpages", "tables that pages name are in the checkout")
@pytest.mark.parametrize("page", BY_NAME)
def test_tables_that_a_page_names_are_there(page: str) -> None:
    assert all((ROOT / file).is_file() for file in re.findall(r"(?<![\w/])(?<!> )examples/[\w.-]+\.\w+", BY_NAME[page]))
