"""Search settings with optuna: train a few steps with each, and keep what earns most on held-out prompts.

    pip install optuna
    python examples/search.py run.yaml 12

Each trial is a run of `podium train` with flags in place of the recipe's settings. Its value is the reward on held-out
prompts after training. Pass the best settings as flags to the whole run.
"""

import subprocess
import sys
from pathlib import Path

import optuna

from podium.runs.run import Run


def reward_of(trial: optuna.Trial) -> float:
    settings = {
        "learning_rate": trial.suggest_float("learning_rate", 1e-6, 1e-4, log=True),
        "temperature": trial.suggest_categorical("temperature", [0.8, 1.0, 1.2]),
    }
    folder = Path("runs/search") / str(trial.number)
    flags = [f"--{name}={value}" for name, value in settings.items()]
    subprocess.run(
        [sys.executable, "-m", "podium", "train", recipe, f"--output_dir={folder}", "--max_steps=20", *flags],
        check=True,
    )
    return Run.load(folder).evaluations["after"]["reward"]["value"]


recipe, trials = sys.argv[1], int(sys.argv[2])
study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
study.optimize(reward_of, n_trials=trials)
print(f"best reward {study.best_value:.3f}: {study.best_params}")
