"""One row of a run's data, played once by its trained model: the program, environment or tools of its recipe."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from podium.cli.flags import EvalRequest
from podium.cli.rows import row_of
from podium.cli.sample import asked, plain_completion, print_episode, right_answer
from podium.cli.targets import find_target, recipe_of, task_of
from podium.console.terminal import console, plain_text, prepare_output, quiet
from podium.errors import ConfigError
from podium.evaluation.evaluate import Policy, load, prepare, scored
from podium.runs.run import CONFIG, Run


def play_row(
    given: str, row: int, *, max_tokens: int | None, temperature: float | None, ignore: Collection[str] | None
) -> None:
    """Print the episode of a row with its rewards; `given` is a run's folder or one of its checkpoints.

    Raises:
        ConfigError: no run, one without data in its recipe, or no such row.
        AgentError: the program has failed.
    """
    target = find_target(given, ignore)
    if target.run is None:
        raise ConfigError(
            f"{given} is a model, not the folder of a run: there is no row to play.",
            fix=f"podium chat {given}",
            given=given,
        )
    if not {"dataset", "datasets", "dataset_name"} & Run(folder=target.run).given.keys():
        config = target.run / CONFIG
        stop = row + 1
        raise ConfigError(
            f"{config} names no dataset: the run was started by a script, which alone has its rows, and "
            "its agent or environment.",
            fix=f"podium chat {given} talks to the model; in the script, "
            f"trainer.generate_completions(rows[{row}:{stop}]) plays the row",
            config=config,
            given=given,
            row=row,
            stop=stop,
        )
    greedy = temperature == 0
    request = EvalRequest(
        samples=None if greedy else 1,
        greedy=greedy,
        temperature=temperature or None,
        overrides={} if max_tokens is None else {"max_completion_length": max_tokens},
    )
    prepare_output()
    quiet()
    recipe = recipe_of(target, request)
    recipe = next((stage.recipe for stage in reversed(recipe.stages) if stage.kind == "grpo"), recipe)
    task = task_of(recipe, request, ([dict(row_of("", recipe.data, row))], f"row {row}"))
    task = replace(task, first_row=row)
    policy = Policy(name=target.name, source=target.source, quantization_config=recipe.quantization_config())
    [[group]] = scored(load(prepare(policy, [task]), task.args, task.rewards), task)
    prompt = group.group.prompt
    title = asked(prompt.row, prompt.content, right_answer(prompt.columns))
    console.print(plain_text(title), style="bold", soft_wrap=True)
    print_episode(plain_completion(group, 0), group.names_K)
