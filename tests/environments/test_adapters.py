"""Two episodes with a scripted policy in every library of environments that is installed (`make test-environments`)."""

from __future__ import annotations

import math
import random
import re
import socket
import threading
import time

import pytest

from podium.agents.environments import EnvironmentPools, reset
from podium.agents.table import ADAPTERS, resolve_environment
from podium.errors import AgentError, ConfigError
from podium.testing import tiny_model

MAZE = """
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Move(Action):
    to: int


class View(Observation):
    told: str = ""


class Maze(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self, goal=3):
        super().__init__()
        self.goal, self.at = goal, 0

    def reset(self, seed=None, episode_id=None):
        self.at = (seed or 0) % 2
        return View(told=f"You are at {self.at}.")

    def step(self, action: Move) -> View:
        self.at = action.to
        done = self.at == self.goal
        return View(told=f"You are at {self.at}.", reward=float(done), done=done)

    @property
    def state(self):
        return State()
"""


def spec(name, tmp_path):
    (tmp_path / "maze.py").write_text(MAZE)
    return "openenv:maze.py:Maze?goal=2" if name == "openenv" else name


def package_of(name):
    return ADAPTERS[name.partition(":")[0]].package


def pools_of(name, folder):
    pytest.importorskip(package_of(name))
    return EnvironmentPools(resolve_environment(spec(name, folder), folder))


def play(pools, policy, *, seed, row=None, most=40):
    """The prompt, the steps and the reward of an episode."""
    [environment] = pools.take([None])
    prompt = reset(environment, row or {}, named=False, seed=seed)
    steps, told = [], prompt[-1]["content"]
    while (not steps or not steps[-1].done) and len(steps) < most:
        steps.append(environment.take_step(policy(told)))
        told = steps[-1].observation
    [reward] = pools.reward_functions()[0](environments=[environment])
    pools.give_back([environment])
    return prompt, steps, reward


def script(*turns):
    left = iter(turns)
    return lambda told: next(left)


def bisect():
    """Guesses in TextArena's notation, by the hints."""
    bounds = [1, 7]

    def guess(told):
        middle = sum(bounds) // 2
        if "higher" in told and "hints" not in told:
            bounds[0] = guess.last + 1
        elif "lower" in told and "hints" not in told:
            bounds[1] = guess.last - 1
        middle = guess.last = sum(bounds) // 2
        return f"I say [{middle}]"

    return guess


EPISODES = {
    "gymnasium:FrozenLake-v1?is_slippery=false": (
        lambda: script("down", "go down", "right, I think", "down", "right", "right"), 1.0, 6
    ),
    "gymnasium:CliffWalking-v1": (lambda: script("up", *["right"] * 11, "down"), -13.0, 13),
    "gymnasium:Blackjack-v1": (lambda: script("hit or stick? stick"), None, 1),
    "gymnasium:Taxi-v4?max_episode_steps=3": (lambda: script("pickup", "dropoff", "north"), None, 3),
    "textarena:GuessTheNumber-v0?max_number=7": (bisect, 1.0, None),
    "textarena:Secretary-v0?N=3": (lambda: script("[continue]", "[accept]"), None, 2),
    "reasoning_gym:chain_sum?attempts=2&max_terms=3": (lambda: script("I pass", "<answer>no</answer>"), 0.0, 2),
    "openenv": (lambda: script("east", "I go to 1", "to 2"), 1.0, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", EPISODES)
def test_two_episodes_in_one_instance(name, tmp_path):
    pools = pools_of(name, tmp_path)
    policy, expected, turns = EPISODES[name]
    first = play(pools, policy(), seed=5)
    again = play(pools, policy(), seed=5)
    prompt, steps, reward = first
    assert repr(first) == repr(again), "the same seed, the same episode"
    assert prompt[-1]["content"]
    assert steps[-1].done
    assert turns is None or len(steps) == turns
    assert expected is None or reward == pytest.approx(expected)
    assert reward == pytest.approx(sum(step.reward for step in steps))
    assert all(isinstance(step.observation, str) and step.observation for step in steps[:-1])
    assert len(pools.training[None]) == 1


@pytest.mark.parametrize("name", EPISODES)
def test_episodes_of_two_instances_are_apart_and_disturb_no_random_numbers(name, tmp_path):
    pools = pools_of(name, tmp_path)
    policy = EPISODES[name][0]
    pools.take([None])
    random.seed(1)
    before = random.getstate()
    while_another_is_played = play(pools, policy(), seed=5)
    assert random.getstate() == before
    assert len(pools.training[None]) == 2
    pools.give_back(pools.training[None])
    assert repr(play(pools, policy(), seed=5)) == repr(while_another_is_played)


def test_a_text_without_an_action_is_a_turn_without_effect(tmp_path):
    pools = pools_of("gymnasium:FrozenLake-v1?is_slippery=false", tmp_path)
    _, steps, _ = play(pools, script("hm", "down", "down", "right", "down", "right", "right"), seed=1)
    assert steps[0] == (
        "There is no action in this. Choose one of: left, down, right, up.",
        0.0,
        False,
        {"invalid": True},
    )
    assert steps[-1].reward == 1.0


def test_gymnasium_describes_positions_as_they_are(tmp_path):
    """The taxi's texts name the cells of its own encoding; Blackjack's the cards."""
    taxi = pytest.importorskip("gymnasium").make("Taxi-v4")
    pools = pools_of("gymnasium:Taxi-v4", tmp_path)
    for seed in range(5):
        observation, _ = taxi.reset(seed=seed)
        row, column, passenger, goal = taxi.unwrapped.decode(observation)
        prompt, _, _ = play(pools, script("north"), seed=seed, most=1)
        numbers = [int(number) for number in re.findall(r"\d+", prompt[-1]["content"])]
        assert numbers == [row, column, *taxi.unwrapped.locs[passenger], *taxi.unwrapped.locs[goal]]
    blackjack = pools_of("gymnasium:Blackjack-v1", tmp_path)
    prompt, _, _ = play(blackjack, script("hit"), seed=3, most=1)
    assert "The dealer shows" in prompt[-1]["content"]


def test_other_environments_of_gymnasium_are_played_by_numbers(tmp_path):
    prompt, steps, reward = play(pools_of("gymnasium:CartPole-v1", tmp_path), lambda told: "I push 1, no, 0", seed=1)
    assert "Choose one of: 0, 1." in prompt[-1]["content"]
    assert 5 < reward == len(steps)
    with pytest.raises(ConfigError, match="numbered actions"):
        resolve_environment("gymnasium:Pendulum-v1")()


@pytest.mark.defect("AG14", "gymnasium's games with rewards below 0, and others")
@pytest.mark.parametrize("name", ["CliffWalking-v1", "Taxi-v4", "MountainCar-v0", "FrozenLake-v1", "Blackjack-v1"])
def test_a_turn_without_an_action_is_no_cheaper_than_a_legal_one(name, tmp_path):
    [silent] = pools_of(f"gymnasium:{name}", tmp_path).take([None])
    [random_one] = pools_of(f"gymnasium:{name}", tmp_path).take([None])
    legal, draws = [], random.Random(0)
    for seed in range(20):
        random_one.reset(seed=seed)
        legal += [random_one.take_step(draws.choice(random_one.actions)).reward for _ in range(1)]
    silent.reset(seed=1)
    nothing = silent.take_step("")
    assert not nothing.done
    assert nothing.reward <= min(*legal, 0.0)


def test_textarena_s_games_draw_apart_in_threads(tmp_path):
    pools = pools_of("textarena:GuessTheNumber-v0?max_number=1000", tmp_path)
    environments = pools.take([None] * 8)

    def number(environment, seed):
        environment.reset(seed=seed)
        return environment._game.env.env.game_number

    alone = [number(environment, seed) for seed, environment in enumerate(environments)]
    found = [0] * 8
    noise = threading.Event()

    def draw():
        while not noise.is_set():
            random.random()

    def run(seed):
        for _ in range(20):
            found[seed] = number(environments[seed], seed)

    other = threading.Thread(target=draw)
    other.start()
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    noise.set()
    other.join()
    assert found == alone
    assert len(set(alone)) > 4


def test_a_game_that_raises_on_a_text_ends_unpaid(tmp_path, monkeypatch):
    pools = pools_of("textarena:GuessTheNumber-v0?max_turns=1&max_number=1000", tmp_path)
    [environment] = pools.take([None])
    monkeypatch.setattr(environment._game, "step", lambda action: 1 / 0)
    reset(environment, {}, named=False, seed=1)
    assert environment.take_step("[4]") == (None, 0.0, True, {"error": "ZeroDivisionError: division by zero"})


def test_textarena_refuses_games_for_several_and_names_near_ones(tmp_path):
    pytest.importorskip("textarena")
    for name in ("TicTacToe-v0", "QuantumTicTacToe-v0"):  # the second ignores the number of players
        with pytest.raises(ConfigError, match="for one player"):
            resolve_environment(f"textarena:{name}")()
    with pytest.raises(ConfigError, match="Did you mean `GuessTheNumber-v0`"):
        resolve_environment("textarena:GuesTheNumber-v0")()


@pytest.mark.defect("AG11", "games that need NLTK's data or a key, unknown datasets of reasoning-gym")
@pytest.mark.parametrize(
    ("spec", "error", "what", "fix"),
    [
        (
            "textarena:Wordle-v0",
            LookupError("\n***\n >>> nltk.download('words')\n***"),
            "`words`",
            "nltk.downloader words",
        ),
        (
            "textarena:TwentyQuestions-v0",
            ValueError("Set OPENROUTER_API_KEY."),
            "another model",
            "export OPENROUTER_API",
        ),
        ("textarena:Hangman-v0", KeyError("x"), "KeyError: 'x'", "GuessTheNumber"),
        ("reasoning_gym:nothing", None, "no dataset `nothing`", "environment: reasoning_gym:chain_sum"),
        ("reasoning_gym:chain_sums", None, "no dataset `chain_sums`", "Did you mean `chain_sum`"),
    ],
)
def test_what_an_environment_lacks_is_named(spec, error, what, fix, monkeypatch, now):
    package = pytest.importorskip(spec.partition(":")[0])
    if error is not None:
        monkeypatch.setattr(package, "make", lambda *_, **__: (_ for _ in ()).throw(error))
    with pytest.raises(ConfigError) as refused:
        resolve_environment(spec)()
    now(str(refused.value))
    assert what in refused.value.what
    assert "\n" not in refused.value.what
    assert fix in refused.value.fix


@pytest.mark.defect("AG12", "an action of one field, written as JSON")
@pytest.mark.parametrize(
    ("kind", "text", "action"),
    [
        ("string", '{"direction": "right"}', "right"),
        ("string", 'I go {"direction": "left"}.', "left"),
        ("string", "right", "right"),
        ("string", '{"way": "right"}', '{"way": "right"}'),
        ("integer", '{"direction": 3}', 3),
        ("integer", "I take 3", 3),
        ("integer", '{"steps": 4}', 4),
    ],
)
def test_one_field_may_be_json(kind, text, action):
    pytest.importorskip("jsonschema")
    from podium.agents.adapters.openenv import OpenEnv

    schema = {"type": "object", "properties": {"direction": {"type": kind}}, "required": ["direction"]}
    assert OpenEnv(None, schema, None, None)._action(text) == {"direction": action}


def test_attempts_are_paid_by_the_last_and_less_for_each(tmp_path):
    pytest.importorskip("reasoning_gym")
    from podium.rewards import gym_rows

    pools = pools_of("reasoning_gym:chain_sum?attempts=3&discount=0.5", tmp_path)
    [row] = gym_rows("chain_sum", size=1, seed=4)
    row = {**row, "prompt": [{"role": "user", "content": row["prompt"]}]}
    right = f"<answer>{row['answer']}</answer>"
    prompt, steps, reward = play(pools, script("<answer>x</answer>", right), seed=1, row=row)
    assert prompt == row["prompt"]
    assert steps[0].observation == "That is not right. You have 2 more attempts. Write your answer in <answer> tags."
    assert steps[1].done
    assert (steps[1].observation, reward) == (None, 0.5)
    assert play(pools, script(right), seed=1, row=row)[2] == 1.0


@pytest.fixture
def server(tmp_path):
    pytest.importorskip("openenv")
    uvicorn = pytest.importorskip("uvicorn")
    from openenv.core.env_server.http_server import create_fastapi_app

    from podium.agents.table import from_file

    (tmp_path / "maze.py").write_text(MAZE)
    maze, move, view = (from_file(f"maze.py:{name}", tmp_path) for name in ("Maze", "Move", "View"))
    app = create_fastapi_app(lambda: maze(goal=2), move, view, max_concurrent_envs=4)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    while not running.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{port}"
    running.should_exit = True
    thread.join()


def test_a_server_of_openenv_plays_as_its_class_does(server, tmp_path):
    policy = EPISODES["openenv"][0]
    in_process = play(pools_of("openenv", tmp_path), policy(), seed=5)
    pools = EnvironmentPools(resolve_environment(f"openenv:{server}"))
    for _ in range(2):
        prompt, steps, reward = play(pools, policy(), seed=5)
        assert (prompt, steps, reward) == in_process
    assert prompt[-1]["content"] == "You are at 1."
    assert steps[0].observation == "This is no action: there is no number in it"
    for either in (pools, pools_of("openenv", tmp_path)):
        _, [step, _], reward = play(either, script("to 1.5", "2"), seed=5)
        assert step.observation == "This is no action: 1.5 is not of type 'integer'"
        assert reward == 1.0


def test_an_error_of_an_environment_of_openenv_is_no_wrong_action(tmp_path):
    pytest.importorskip("openenv")
    (tmp_path / "bad.py").write_text(MAZE.replace("self.at = action.to", "self.at = int('here')"))
    with pytest.raises(AgentError, match=r"`OpenEnv` raised ValueError: invalid literal .* in step 1"):
        play(EnvironmentPools(resolve_environment("openenv:bad.py:Maze", tmp_path)), script("2"), seed=0)


def test_actions_of_several_fields_are_json(tmp_path):
    pytest.importorskip("openenv")
    two = MAZE.replace("    to: int", "    to: int\n    by: str").replace("told=f", "left=1, told=f")
    (tmp_path / "two.py").write_text(two.replace('    told: str = ""', '    told: str = ""\n    left: int = 0'))
    pools = EnvironmentPools(resolve_environment("openenv:two.py:Maze?observation=told", tmp_path))
    turns = script("{" + '"a":{' * 100_000 + "}", '{"to": 1}', 'So {"to": 3, "by": "foot"}.')
    prompt, steps, reward = play(pools, turns, seed=0)
    assert prompt[-1]["content"] == "You are at 0.\nAnswer with a JSON object with to, by."
    assert "write a JSON object with to, by" in steps[0].observation
    assert steps[1].observation == "This is no action: 'by' is a required property"
    assert (steps[2].observation, reward) == ("You are at 3.", 1.0)


def test_without_a_server_there_is_one_message():
    pytest.importorskip("openenv")
    with pytest.raises(AgentError, match=r"no OpenEnv server at http://127\.0\.0\.1:9: "):
        EnvironmentPools(resolve_environment("openenv:http://127.0.0.1:9"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EPISODES)
def test_two_training_steps(name, tmp_path, make_trainer):
    """Prompts from `reset`, several turns, and the environment's own reward, without a dataset."""
    pytest.importorskip(package_of(name))
    trainer = make_trainer(
        [],
        model=tiny_model("llama", max_position_embeddings=2048),
        rows=None,
        environment_factory=resolve_environment(spec(name, tmp_path), tmp_path),
        per_device_train_batch_size=8,
        max_completion_length=256,
    )
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(trainer.environments) == 8
    column = f"rewards/{type(trainer.environments[0]).__name__}/mean"
    rewards = [row[column] for row in trainer.state.log_history if column in row]
    assert len(rewards) == 2
    assert all(math.isfinite(reward) for reward in rewards)
