"""The command line: quick help, one message for every mistake, and whole runs of a tiny model."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from podium.cli import BEGINS, app, main
from podium.cli.flags import EvalRequest
from podium.cli.targets import rows_of
from podium.cli.train import UNFINISHED, resumable
from podium.cli.words import parse_flags
from podium.console.terminal import console, ignoring_closed_pipes
from podium.data.rows import load_data
from podium.errors import ConfigError, DataError, Finding, RewardError
from podium.errors.texts import clean, quoted
from podium.isolation.reward_results import raised
from podium.recipe import load
from podium.recipe.document import Document
from podium.runs.find_model import find_model
from podium.runs.shipping.origin import opening
from podium.testing import save_tiny_model
from podium.trainer.checkpointing import EndsOnSignal


@pytest.fixture
def cli(tmp_path, monkeypatch):
    """`cli("train run.yaml")` in an empty folder: exit code, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "140")

    def run(line: str, stdin: str = "") -> tuple[int, str, str]:
        result = CliRunner().invoke(app, line.split(), input=stdin)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result.exit_code, result.stdout, result.stderr

    return run


# ---- start ----


def test_help_is_quick_and_imports_nothing_heavy():
    program = "import sys; sys.argv = ['podium', '--help']; from podium.cli import main\ntry:\n    main()\nfinally:\n"
    program += "    print([m for m in ('torch', 'transformers', 'trl', 'datasets', 'numpy') if m in sys.modules])"
    before = os.times()
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    after = os.times()
    # Time on the processor, not on the clock: other tests run beside this one. Starting does not wait for anything.
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    assert done.stdout.endswith("[]\n")
    assert "train" in done.stdout
    assert seconds < 1.0


def test_importing_podium_is_light_and_names_are_there():
    program = (
        "import sys, podium; print('torch' in sys.modules, podium.Prompt.__module__, 'GRPOTrainer' in dir(podium))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == "False podium.records True\n"


def test_every_public_name_exists():
    import podium

    assert all(getattr(podium, name) is not None for name in podium.__all__)
    with pytest.raises(AttributeError, match="GRPOTrianer"):
        podium.GRPOTrianer  # noqa: B018


# ---- flags ----


@pytest.mark.parametrize(
    ("line", "flags"),
    [
        ("r --learning_rate 2e-6", {"learning_rate": 2e-6}),
        ("r --num-generations=4", {"num_generations": 4}),
        ("r --bf16 --seed 3", {"bf16": True, "seed": 3}),
        ("r --no-bf16", {"bf16": False}),
        ("r --bf16 false", {"bf16": False}),
        ("r --reward_funcs a b", {"reward_funcs": ["a", "b"]}),
        ("r --reward-weights [1,2]", {"reward_weights": [1, 2]}),
        ("r --top_k -1 --run_name=-x", {"top_k": -1, "run_name": "-x"}),
        ("r --run_name 12:30", {"run_name": "12:30"}),
    ],
)
def test_any_key_is_a_flag(line, flags):
    assert parse_flags(line.split()) == (["r"], flags)


@pytest.mark.parametrize("line", ["r --seed 1 --seed 2", "r -seed 1"])
def test_flags_that_cannot_be_meant_are_refused(line):
    with pytest.raises(ConfigError):
        parse_flags(line.split())


# ---- mistakes ----


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("train", "takes one recipe"),
        ("train a.yaml b.yaml", "got 2: a.yaml, b.yaml"),
        ("train nowhere.yaml", "There is no recipe nowhere.yaml"),
        (
            "train quickstart --learning_rat 1e-6",
            "--learning_rat: unknown key `learning_rat`. [C009]\n  fix: Did you mean `learning_rate`?",
        ),
        (
            "train quickstart --learning-rate",
            "--learning_rate: needs a number behind it. [C003]\n  fix: for example --learning_rate 1e-06",
        ),
        ("train quickstart --temprature 2 --num_generations 32", "--temprature: unknown key"),  # no warnings before it
        ("train quickstart --num_gen 4", "--num_gen: unknown key `num_gen`"),
        ("train quickstart --loss-type drgrpo", "--loss_type: `loss_type` must be one of"),
        ("train quickstart --num_generations 7", "--num_generations: generation_batch_size (128) must be"),
        ("train quickstart --eval_samples 0", "--eval_samples: `eval_samples` is 0; it must be at least 1"),
        ("train quickstart --eval_temperature 0", "between 1e-06 and 100: 0.001 draws the likeliest completion"),
        ("train quickstart --vllm_mode server", "--vllm_mode: vllm_mode='server' belongs to vLLM"),
        ("train quickstart --model builtin:smollm", "no built-in model `builtin:smollm`"),
        ("train quickstart --model ./nope", "There is no folder ./nope"),
        ("train quickstart --dataset builtin:addition", "no built-in dataset `builtin:addition`"),
        ("sample quickstart --rewards nope", "no reward `nope`"),
        ("chat ./nope", "There is no folder ./nope"),
    ],
)
def test_mistakes_are_one_message_and_code_2(cli, line, message):
    code, out, err = cli(line)
    assert code == 2
    assert err.startswith(f"{BEGINS[line.split()[0]]} ...\nerror: ")
    assert message in err
    assert "Traceback" not in out + err


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "1+1"}], "no `prompt`"),
        ([{"prompt": "1+1"}, {"prompt": None}], "row 1: prompt is null"),
        ([{"prompt": "1+1"}, {"prompt": ""}], "row 1: prompt is empty"),
        ([{"prompt": "1+1 " * 200}], "too long"),
    ],
)
def test_bad_rows_are_named_before_weights_are_loaded(cli, tmp_path, rows, message):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = Path(save_tiny_model(tmp_path / "model"))
    (folder / "model.safetensors").rename(folder / "weights.safetensors")  # loading would fail
    code, _, err = cli(f"train quickstart --model {folder} --dataset rows.jsonl")
    assert code == 2
    assert message in err


def test_a_bug_keeps_its_traceback(cli, monkeypatch):
    monkeypatch.setattr("podium.recipe.document.shipped_recipes", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli("recipes")


# ---- verbs ----


def test_recipes_are_listed(cli):
    code, out, _ = cli("recipes")
    assert code == 0
    assert re.search(r"^quickstart +\S", out, re.MULTILINE)


RECIPE = """\
model: {model}
dataset: builtin:additions
rewards:
  - mine.py:length
  - {{name: answer_format, weight: 2}}
accuracy: length
per_device_train_batch_size: 4
num_generations: 2
max_completion_length: 4
learning_rate: 1e-3
max_steps: 2
logging_steps: 1
save_strategy: "no"
eval_rows: 3
eval_samples: 2
eval_temperature: 0.7
output_dir: out
"""


@pytest.fixture
def tiny(tmp_path):
    """A folder with a tiny model, a reward file and a recipe."""
    model = save_tiny_model(tmp_path / "model")
    (tmp_path / "mine.py").write_text(
        "def length(completions, **columns):\n"
        "    texts = [c if isinstance(c, str) else c[0]['content'] for c in completions]\n"
        "    return [len(text) / 4 for text in texts]\n"
    )
    (tmp_path / "run.yaml").write_text(RECIPE.format(model=model))
    return tmp_path


def test_train_shows_held_out_numbers_and_leaves_a_run_that_can_be_used(cli, tiny):
    code, out, err = cli("train run.yaml --seed 1")
    assert code == 0, err
    for piece in (
        "before training: 3 of 80 held-out prompts, 2 completions each",
        "step 2/2",
        "reward",
        "length ",
    ):
        assert piece in out
    assert re.search(r"accuracy \(pass@1\) +\d\.\d{3} \[\d\.\d{3}, \d\.\d{3}\] +\d\.\d{3} \[", out)
    assert "No difference shown: accuracy" in out
    assert re.search(r"^next: podium (sample run.yaml|doctor out)$", out, re.MULTILINE)
    assert len(re.findall(r"proof on the first batch: \d+ checks passed", err)) == 1
    assert "every trained tensor gets a gradient" not in err
    assert (tiny / "out" / "model.safetensors").is_file()
    assert yaml.safe_load((tiny / "out" / "config.yaml").read_text())["seed"] == 1
    code, _, err = cli("train out/config.yaml --no-eval --output_dir again")
    assert code == 0, err
    base, ours, again = ((tiny / folder / "model.safetensors").read_bytes() for folder in ("model", "out", "again"))
    assert ours == again
    assert ours != base


def test_every_check_of_the_proof_is_printed_with_v_and_a_resumed_run_counts_its_own_steps(cli, tiny):
    run = "train run.yaml --no-eval --save_strategy steps --save_steps 1 --max_steps"
    code, out, err = cli(f"{run} 2 -v")
    assert code == 0, err
    assert "proof on the first batch: " in err
    assert re.search(r"ok +every trained tensor gets a gradient", err)
    assert "2 steps in" in out
    code, out, err = cli(f"{run} 3 --resume_from_checkpoint true")
    assert code == 0, err
    assert "1 of 3 steps in" in out
    code, out, err = cli(f"{run} 3 --resume_from_checkpoint true")
    assert code == 0, err
    assert "The run had ended at step 3 already: nothing was trained. To go on, give a higher --max_steps." in " ".join(
        out.split()
    )


def test_a_reader_that_goes_away_ends_nothing(monkeypatch, tmp_path):
    """As in `podium train | head`."""
    ends = [os.pipe(), os.pipe()]
    os.close(ends[0][0])
    streams = [os.fdopen(writer, "w") for _, writer in ends]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    with ignoring_closed_pipes():
        for _ in range(2):
            console.print("step")
            sys.stdout.flush()
    assert (sys.stdout, sys.stderr) == tuple(streams)
    for stream in streams:
        stream.close()
    with os.fdopen(ends[1][0]) as said:
        assert said.read().strip() == "Nobody reads stdout any more: the run goes on, and prints nothing there."


@pytest.mark.slow
def test_ctrl_c_ends_training_after_its_step_and_says_how_it_goes_on(tiny):
    flags = "--no-eval --max_steps 100000 --save_strategy steps --save_steps 1 --save_total_limit 2"
    command = [sys.executable, "-m", "podium", "train", "run.yaml", *flags.split()]
    process = subprocess.Popen(command, cwd=tiny, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        while not list((tiny / "out").glob("checkpoint-*")):
            assert process.poll() is None
            time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=200)
    finally:
        process.kill()
    assert process.returncode == UNFINISHED
    assert "Traceback" not in err
    said = re.search(r"^To go on from (\S+): the same command with --resume_from_checkpoint true$", err, re.MULTILINE)
    assert (tiny / said[1] / "trainer_state.json").is_file()


def test_ctrl_c_without_a_checkpoint_says_that_too(tmp_path, capsys):
    with pytest.raises(KeyboardInterrupt), resumable([tmp_path], EndsOnSignal(), is_main=True):
        raise KeyboardInterrupt
    assert "No checkpoint was written, so this run cannot go on." in capsys.readouterr().err


def test_a_reward_that_fails_says_how_the_run_goes_on(tmp_path):
    for saved, fix in (([], "look"), (["checkpoint-6"], f"look; to go on from {tmp_path / 'checkpoint-6'}: ")):
        for name in saved:
            (tmp_path / name).mkdir()
        with pytest.raises(RewardError) as error, resumable([tmp_path], EndsOnSignal(), is_main=True):
            raise RewardError("x", fix="look")
        assert str(error.value).startswith(f"x\n  fix: {fix}")


ITERABLES = """
def generated(completions, answer):
    for text, gold in zip(completions, answer, strict=True):
        yield float(text.strip() == gold)

def unordered(completions, answer):
    return {1.0, 0.0}
"""


@pytest.mark.slow
def test_rewards_test_reads_a_generator_and_refuses_a_set_once(cli, tmp_path):
    (tmp_path / "mine.py").write_text(ITERABLES)
    rows = [{"prompt": f"{n} + 7 = ", "answer": str(n + 7)} for n in range(10, 22)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, _ = cli("rewards test mine.py:generated --data rows.jsonl --json")
    assert code == 0, out
    assert json.loads(out)["rewards"][0]["findings"] == []
    code, out, _ = cli("rewards test mine.py:unordered --data rows.jsonl --json")
    assert code == 1, out
    assert [each["code"] for each in json.loads(out)["rewards"][0]["findings"]] == ["W005"]


def test_sample_shows_rewards_and_advantages_and_trains_nothing(cli, tiny):
    code, out, err = cli("sample run.yaml -n 2")
    assert code == 0, err
    assert len(re.findall(r"^Row \d+: What is", out, re.MULTILINE)) == 2
    for column in ("length", "answer_format", "reward", "advantage", "completion"):
        assert column in out
    assert not (tiny / "out").exists()


def test_chat_answers_piped_lines_with_a_run_s_model(cli, tiny):
    cli('train run.yaml --no-eval --max_steps 1 --lora {"r":4}')
    assert (tiny / "out" / "adapter_config.json").is_file()
    code, out, err = cli("chat out --max-tokens 3 --temperature 0", stdin="hello\n/new\nhello\n")
    assert code == 0, err
    assert "M034" in err, "its rewards had no spread, so the adapter is as it began"
    first, second, *rest = out.split("\n")
    assert first == second
    assert not any(rest)


GREEDY = "--temperature 0 --max-tokens 16"


@pytest.mark.slow
def test_chat_begins_as_the_prompts_of_the_training_did(cli, tiny):
    """Of a run and of its merged model alike; `--system` takes its place."""
    (tiny / "qa.csv").write_text("question,expert_answer\n1+1,2\n2+2,4\n3+3,6\n")
    (tiny / "mine.yaml").write_text(
        f"model: {tiny / 'model'}\ndataset: qa.csv\nprompt: '{{question}}'\nanswer: '{{expert_answer}}'\n"
        "system: Add.\nexamples: [{question: 4+4, expert_answer: 8}]\n"
        "rewards: [{name: numeric_match, weight: 1000}, mine.py:length]\n"
        "per_device_train_batch_size: 4\nnum_generations: 2\nmax_completion_length: 4\nmax_steps: 1\n"
        "lora: {r: 4}\nlearning_rate: 1.0e-3\noutput_dir: out\n"
    )
    for line in ("train mine.yaml --no-eval", "merge out --out merged"):
        code, _, err = cli(line)
        assert code == 0, err
    turns = [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "4+4"},
        {"role": "assistant", "content": "8"},
    ]
    assert opening(find_model("out")) == opening(find_model("merged")) == turns
    assert opening(find_model(str(tiny / "model"))) == []
    first, note = cli(f"chat out {GREEDY}", stdin="5+5\n")[1:]
    assert cli(f"chat merged {GREEDY}", stdin="5+5\n")[1:] == (first, note)
    assert "The talk begins as the prompts of the training did, with system 'Add.' and 2 more messages" in note
    for flag in ("--system Multiply.", "--system="):
        other, note = cli(f"chat merged {flag} {GREEDY}", stdin="5+5\n")[1:]
        assert note == "Loading the model ...\n"
        assert other != first


def test_a_file_written_for_trl_runs_unchanged(cli, tiny):
    (tiny / "rows.jsonl").write_text('{"prompt": "1+1"}\n{"prompt": "2+2"}\n')
    (tiny / "trl.yaml").write_text(
        f"model_name_or_path: {tiny / 'model'}\n"
        "dataset_name: rows.jsonl\n"
        "reward_funcs: [think_format_reward, mine.length]\n"
        "output_dir: out\n"
        "learning_rate: 1.0e-5\n"
        "per_device_train_batch_size: 4\n"
        "num_generations: 2\n"
        "max_completion_length: 4\n"
        "max_steps: 1\n"
        "logging_steps: 1\n"
        "use_peft: true\n"
        "lora_r: 4\n"
        "bf16: false\n"
        "report_to: none\n"
    )
    code, out, err = cli("train --config trl.yaml --beta 0.01")
    assert code == 0, err
    assert "held-out" not in out
    assert (tiny / "out" / "adapter_model.safetensors").is_file()


# ---- model text on the terminal ----


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("\x1b[2J\x1b[31mred\x1b[0m", "red"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;aGVsbG8=\x07paste", "paste"),
        ("\x9b31mcsi", "csi"),
        ("a\rb\x08\x00\x7fc", "abc"),
        ("\u202edesrever", "desrever"),
        ("line\n\ttab caf\u00e9", "line\n\ttab caf\u00e9"),
        ("[bold]markup[/bold]", "[bold]markup[/bold]"),
        ("cut \x1b[", "cut "),
        ("open \x1b]0;title\nthe next line", "open \nthe next line"),
    ],
)
def test_control_sequences_of_models_never_reach_the_terminal(text, left):
    assert clean(text) == left


def test_the_text_of_an_exception_changes_neither_the_terminal_nor_the_message(monkeypatch, capsys):
    error = ValueError("\x1b[2J\x1b]0;owned\x07no number\u202e\n  fix: rm -r ~")
    failure = raised(error, frozenset(), [])
    for message in (
        RewardError(f"reward {failure.what}", fix="look"),
        DataError(f"a is not a Parquet file: {quoted(error)}", code="D030"),
        Finding(code="W010", severity="error", what=f"reward {failure.what}", fix="look"),
    ):
        assert "no number\n      fix: rm -r ~" in str(message)
        assert not set("\x1b\x07\u202e") & set(str(message))

    def fails() -> None:
        raise error

    monkeypatch.setattr("podium.cli.app", fails)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    shown = capsys.readouterr().err
    assert shown.startswith("Traceback")
    assert shown.endswith("ValueError: no number\n  fix: rm -r ~\n")


def test_other_rows_are_evaluated_with_what_the_training_began_with(tmp_path):
    """The system message and the example of a built-in task stand in its rows; the example itself is no test."""
    document = Document(name="run.yaml", folder=tmp_path, values={}, lines={})
    recipe = load(document, {"model": "m", "dataset": "builtin:additions", "rewards": ["exact_match"]})
    trained = load_data(recipe.data).train[0]["prompt"]
    file = tmp_path / "other.csv"
    file.write_text("q,a\nWhat is 3 + 4?,7\nWhat is 2 + 2?,4\n")
    with pytest.raises(ConfigError, match="has no column `prompt`") as error:
        rows_of(recipe, EvalRequest(data=str(file)))
    assert error.value.fix == 'name the columns: --prompt "{q}" --answer "{a}"'
    file.write_text(file.read_text().replace("q,a", "prompt,answer"))
    [row], _ = rows_of(recipe, EvalRequest(data=str(file)))
    assert row["prompt"] == [*trained[:-1], {"role": "user", "content": "What is 2 + 2?"}]
    own, _ = rows_of(recipe, EvalRequest(data="builtin:additions", split="train"))
    assert own[0]["prompt"] == trained
