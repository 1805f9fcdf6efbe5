"""Environments: TRL's rules for factories (S5-S12, S19-S23, T10, T12), and environments in plain text."""

from __future__ import annotations

import asyncio
import textwrap
import threading

import pytest

import podium
from podium import TextEnvironment
from podium.agents.environments import EnvironmentPools, extended, placeholder_rows, reset
from podium.agents.table import resolve_environment
from podium.errors import AgentError, ConfigError, DataError, PodiumError


class Base:
    def reset(self, **row):
        self.row = row

    def zoom(self, factor: int) -> int:
        """Zoom.

        Args:
            factor: How far.
        """
        return factor * self.scale

    scale = 2


class Maze(Base):
    made = 0

    def __init__(self):
        type(self).made += 1

    def advance(self, steps: int) -> str:
        """Advance.

        Args:
            steps: How many.
        """
        return f"{id(self)} {steps}"

    @staticmethod
    def look() -> str:
        """Look around."""
        return "dark"

    @classmethod
    def build(cls) -> None:
        """No tool."""

    @property
    def broken(self):
        raise AssertionError("properties are not evaluated")

    def _secret(self) -> None:
        """No tool."""

    def get_reward(self):
        return 0.5


class Shop:
    def reset(self, **row):
        return "A shop."

    async def buy(self, thing: str) -> str:
        """Buy.

        Args:
            thing: Its name.
        """
        return thing

    async def get_reward(self):
        await asyncio.sleep(0)
        return 2.0


class Deeper(Maze):
    pass


class Silent(Base):
    pass


@pytest.fixture(autouse=True)
def count():
    Maze.made = 0


def names(pools, name=None):
    return [tool.name for tool in pools.tools(name)]


def test_public_functions_of_the_class_are_tools_in_trl_s_order():
    environment = EnvironmentPools(Maze)
    assert names(environment) == ["advance", "look", "zoom"]
    assert [method.__name__ for method in environment.methods(None)] == ["advance", "look", "zoom"]
    assert environment.has_tools
    assert [tool.is_async for tool in EnvironmentPools(Shop).tools(None)] == [True]


def test_tools_are_bound_to_the_environment_of_their_completion():
    pools = EnvironmentPools(Maze)
    one, two = pools.take([None, None])
    calls = [tool.function for environment in (one, two) for tool in pools.tools(None, environment)]
    assert [call(3) for call in calls[::3]] == [f"{id(one)} 3", f"{id(two)} 3"]
    assert pools.tools(None, one)[0].schema is pools.tools(None, two)[0].schema is pools.tools(None)[0].schema
    two.scale = 5
    assert [call(2) for call in calls[2::3]] == [4, 10]


def test_an_environment_without_reset_and_what_is_no_factory():
    class NoReset:
        reset = property(lambda self: print)

    with pytest.raises(ValueError, match="must define a callable `reset`"):
        EnvironmentPools(NoReset)
    with pytest.raises(ConfigError, match="is Maze"):
        EnvironmentPools(Maze())
    with pytest.raises(ConfigError, match="`environment_factory` `b` is int 3"):
        EnvironmentPools({"a": Maze, "b": 3})
    with pytest.raises(ConfigError, match="empty"):
        EnvironmentPools({})


def test_a_factory_that_raises_is_named_with_its_own_line():
    def make():
        raise OSError("no port")

    with pytest.raises(AgentError, match=r"`environment_factory` raised OSError: no port") as caught:
        EnvironmentPools(make)
    assert caught.value.what.count("File ") == 1
    assert "test_environments.py" in caught.value.fix


def test_the_probe_seeds_a_pool_that_grows_only_when_more_are_needed():
    pools = EnvironmentPools({"maze": Maze, "shop": Shop})
    probe = pools.training["maze"][0]
    first = pools.take(["maze", "shop", "maze", "shop"])
    assert first[0] is probe
    assert [type(each) for each in first] == [Maze, Shop, Maze, Shop]
    assert Maze.made == 2
    pools.give_back(first)
    assert pools.take(["maze", "maze"]) == [first[0], first[2]]
    assert pools.take(["maze"])[0] not in first
    assert Maze.made == 3
    assert [len(pools.training[name]) for name in ("maze", "shop")] == [3, 2]


def test_evaluation_has_instances_of_its_own():
    pools = EnvironmentPools(Maze)
    training = pools.take([None] * 2)
    pools.give_back(training)
    evaluation = pools.take([None] * 3, evaluation=True)
    assert not set(map(id, training)) & set(map(id, evaluation))
    assert pools.evaluation[None] == evaluation
    assert pools.training[None] == training


def test_a_discarded_environment_never_comes_back():
    pools = EnvironmentPools(Maze)
    one, two = pools.take([None, None])
    pools.discard(one)
    pools.give_back([one, two])
    assert pools.take([None]) == [two]
    assert one not in pools.take([None] * 3)


def test_instances_taken_in_threads_are_different():
    pools = EnvironmentPools(Maze)
    taken = []
    threads = [threading.Thread(target=lambda: taken.extend(pools.take([None] * 20))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, taken))) == 160


def test_rows_choose_their_environment_by_name():
    pools = EnvironmentPools({"maze": Maze, "shop": Shop})
    assert pools.name_of({"environment": "shop"}) == "shop"
    for row in ({"environment": "mase"}, {}):
        with pytest.raises(ValueError, match="not among the environments passed to `environment_factory`"):
            pools.name_of(row)
    with pytest.raises(DataError, match="Did you mean `maze`"):
        pools.name_of({"environment": "mase"})
    assert EnvironmentPools(Maze).name_of({"environment": "anything"}) is None


def test_reset_gets_every_column_but_the_name_of_the_environment():
    environment = Maze()
    row = {"prompt": [{"role": "user", "content": "Go."}], "answer": 3, "environment": "maze"}
    reset(environment, row, named=False)
    assert environment.row == row
    reset(environment, row, named=True)
    assert environment.row == {key: row[key] for key in ("prompt", "answer")}
    assert reset(environment, {"answer": 3}, named=True) == [{"role": "user", "content": ""}]
    assert environment.row == {"answer": 3}


def returns(value):
    return type("Env", (), {"reset": lambda self, **row: value})()


TEXT = {"type": "text", "text": "Look: "}
IMAGE = {"type": "image", "image": None}
CONVERSATION = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go. "}]


@pytest.mark.parametrize(
    ("prompt", "returned", "last"),
    [
        (CONVERSATION, None, "Go. "),
        (CONVERSATION, "", "Go. "),
        (CONVERSATION, "North?", "Go. North?"),
        (CONVERSATION, [IMAGE], [{"type": "text", "text": "Go. "}, IMAGE]),
        ([{"role": "user", "content": [TEXT]}], "North?", [TEXT, {"type": "text", "text": "North?"}]),
        ([{"role": "user", "content": [TEXT]}], [IMAGE], [TEXT, IMAGE]),
        ([{"role": "assistant", "content": "I "}], "go", "I go"),
    ],
)
def test_what_reset_returns_is_appended_to_the_last_message(prompt, returned, last):
    """S22, against TRL's own lines (grpo_trainer.py:2389-2398)."""
    before = [dict(message) for message in prompt]
    extended_prompt = reset(returns(returned), {"prompt": prompt}, named=False)
    observation, content = returned, prompt[-1]["content"]
    if observation is not None:
        if isinstance(observation, list) and isinstance(content, str):
            content = [{"type": "text", "text": content}]
        if isinstance(observation, str) and isinstance(content, list):
            observation = [{"type": "text", "text": observation}]
        expected = [*prompt[:-1], {**prompt[-1], "content": content + observation}]
    else:
        expected = prompt
    assert extended_prompt == expected
    assert extended_prompt[-1]["content"] == last
    assert prompt == before, "the row is not changed"


def test_messages_come_after_the_prompt_and_in_place_of_an_empty_one():
    messages = [{"role": "system", "content": "Play."}, {"role": "user", "content": "Go."}]
    assert reset(returns(messages), {}, named=False) == messages
    assert extended(CONVERSATION, messages) == [*CONVERSATION, *messages]
    assert extended("Play ", "now") == "Play now"


@pytest.mark.parametrize("value", [3, {"role": "user"}, [1], b"text"])
def test_other_returns_of_reset_are_one_message(value):
    with pytest.raises(AgentError, match=r"environment `Env` returned .* in reset of row 7: "):
        reset(returns(value), {}, named=False, index=7)


def test_an_async_reset_is_named():
    class Late:
        async def reset(self, **row):
            return ""

    with pytest.raises(AgentError, match="returned a coroutine"):
        reset(Late(), {}, named=False)


def test_a_reset_that_takes_no_columns_is_told_its_signature():
    class Narrow:
        def reset(self):
            return ""

    with pytest.raises(AgentError, match=r"raised TypeError: .*unexpected keyword argument 'prompt'") as caught:
        reset(Narrow(), {"prompt": []}, named=False)
    assert "def reset(self, **row)" in caught.value.fix


def test_a_seed_goes_to_a_reset_that_names_it():
    class Seeded(Base):
        def reset(self, seed=None, **row):
            self.row = {"seed": seed, **row}

    environment, plain = Seeded(), Maze()
    reset(environment, {}, named=False, seed=11)
    assert environment.row["seed"] == 11
    reset(environment, {"seed": 3}, named=False, seed=11)
    assert environment.row["seed"] == 3
    reset(plain, {}, named=False, seed=11)
    assert plain.row == {}


def test_get_reward_is_a_column_for_each_exact_class():
    pools = EnvironmentPools({"maze": Maze, "again": Maze, "deeper": Deeper, "shop": Shop, "silent": Silent})
    functions = pools.reward_functions()
    assert [function.__name__ for function in functions] == ["Maze", "Deeper", "Shop"]
    environments = pools.take(["maze", "deeper", "shop", "silent", "again"])
    assert functions[0](environments=environments) == [0.5, None, None, None, 0.5]
    assert functions[1](environments=environments, prompts=[]) == [None, 0.5, None, None, None]
    assert asyncio.run(functions[2](environments=environments)) == [None, None, 2.0, None, None]
    functions.clear()
    assert len(pools.reward_functions()) == 3, "a list of its own each time"
    assert EnvironmentPools(Silent).reward_functions() == []


def test_a_factory_that_defines_its_class_is_paid_for_every_instance():
    """Each call makes a class of its own, with the same name."""

    def factory():
        class Own(Base):
            def get_reward(self):
                return 2.0

        return Own()

    pools = EnvironmentPools(factory)
    [reward] = pools.reward_functions()
    assert reward(environments=pools.take([None] * 3)) == [2.0, 2.0, 2.0]


def test_rewards_of_environments_resolve_as_the_user_s_do():
    from podium.rewards.resolve import resolve_rewards

    pools = EnvironmentPools({"maze": Maze, "shop": Shop})
    rewards = resolve_rewards(pools.reward_functions())
    assert [(reward.name, reward.is_async) for reward in rewards] == [("Maze", False), ("Shop", True)]


def test_placeholder_rows():
    pools = EnvironmentPools(Maze)
    rows = placeholder_rows(pools, num_prompts=3, max_steps=1)
    assert rows.to_list() == [{"prompt": [{"content": "", "role": "user"}]}] * 3
    with pytest.raises(ConfigError, match="requires a `train_dataset` with an `environment` column"):
        placeholder_rows(EnvironmentPools({"maze": Maze}), num_prompts=3, max_steps=1)
    with pytest.raises(ConfigError, match="`max_steps` must be set"):
        placeholder_rows(pools, num_prompts=3, max_steps=-1)


# ---- plain text ----


class Guess(TextEnvironment):
    def reset(self, number, **row):
        self.number = number
        return "Guess my number from 1 to 7."

    def step(self, text):
        guess = int(text)
        if guess == self.number:
            return None, 1.0, True, {"found": True}
        return ("higher" if guess < self.number else "lower"), -0.1, False, {}


def test_an_episode_in_plain_text_is_paid_by_the_sum_of_its_steps():
    pools = EnvironmentPools(Guess)
    [environment] = pools.take([None])
    [reward] = pools.reward_functions()
    assert reward.__name__ == "Guess"
    assert not pools.has_tools
    for _ in range(2):  # the second as if there had been no first
        assert reset(environment, {"number": 6}, named=False)[-1]["content"] == "Guess my number from 1 to 7."
        assert reward(environments=[environment]) == [0.0]
        assert [environment.take_step(text) for text in ("4", "7", "6")] == [
            ("higher", -0.1, False, {}),
            ("lower", -0.1, False, {}),
            (None, 1.0, True, {"found": True}),
        ]
        assert reward(environments=[environment]) == [pytest.approx(0.8)]
        assert environment.step_rewards == (-0.1, -0.1, 1.0)


def test_max_turns_end_an_episode():
    class Short(Guess):
        max_turns = 2

    environment = Short()
    reset(environment, {"number": 6}, named=False)
    assert [environment.take_step(text).done for text in ("1", "2")] == [False, True]


class Script(TextEnvironment):
    def __init__(self, returned):
        self.returned = returned

    def reset(self, **row):
        pass

    def step(self, text):
        return self.returned


@pytest.mark.parametrize(
    ("returned", "what"),
    [
        (None, "returned None"),
        ("higher", "returned 'higher'"),
        (("higher", 0.0, False), "returned ('higher', 0.0, False)"),
        (("higher", 0.0, False, False, {}), "returned ('higher', 0.0, False, False, {})"),
        ((3, 0.0, False, {}), "3 for the observation"),
        (("higher", "1", False, {}), "'1' for the reward"),
        (("higher", 10**400, False, {}), f"{str(10**400)[:40]}... for the reward"),
        (("higher", 1e39, False, {}), "1e+39 for the reward"),
        (("higher", float("nan"), False, {}), "nan for the reward"),
        (("higher", None, False, {}), "None for the reward"),
        (("higher", 0.0, 0, {}), "0 for `done`"),
        (("higher", 0.0, False, None), "None for `info`"),
        ((None, 0.0, False, {}), "no observation, though `done` is False,"),
    ],
)
def test_a_step_that_is_none_is_one_message_with_class_row_and_step(returned, what):
    environment = Script(returned)
    reset(environment, {}, named=False, index=12)
    with pytest.raises(AgentError) as caught:
        environment.take_step("4")
    assert caught.value.what.startswith("environment `Script` returned ")
    assert caught.value.what.endswith(" in step 1 of row 12")
    assert what in caught.value.what
    assert "(observation, reward, " in caught.value.fix
    assert ("terminated or truncated" in caught.value.fix) == (isinstance(returned, tuple) and len(returned) == 5)
    assert environment.step_rewards == ()


def test_numbers_of_numpy_are_numbers():
    import numpy as np

    environment = Script(("on", np.float32(0.5), np.bool_(False), {}))
    reset(environment, {}, named=False)
    step = environment.take_step("4")
    assert step == ("on", 0.5, False, {})
    assert (type(step.reward), type(step.done)) == (float, bool)


def test_what_a_step_raises_has_the_user_s_own_frames_alone():
    environment = Guess()
    reset(environment, {"number": 6}, named=False, index=3)
    environment.take_step("1")
    with pytest.raises(AgentError, match="environment `Guess` raised ValueError: invalid literal") as caught:
        environment.take_step("four", 5.0)
    lines = caught.value.what.splitlines()
    assert lines[0].endswith("in step 2 of row 3")
    assert lines[1].strip().startswith(f'File "{__file__}"')
    assert "guess = int(text)" in lines[2]
    assert caught.value.what.count("File ") == 1
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_step_that_ends_the_interpreter_is_an_error_as_well():
    class Ends(Script):
        def step(self, text):
            raise SystemExit(3)

    with pytest.raises(AgentError, match="raised SystemExit: 3"):
        Ends(None).take_step("")


def test_a_step_that_hangs_ends_its_episode_and_the_use_of_its_environment(caplog):
    release = threading.Event()

    class Hangs(Guess):
        def step(self, text):
            if text == "wait":
                release.wait(20)
            return super().step("1")

    pools = EnvironmentPools(Hangs)
    [environment] = pools.take([None])
    reset(environment, {"number": 6}, named=False, index=4)
    assert environment.take_step("1", 5.0).observation == "higher"
    assert environment.take_step("wait", 0.05) == (None, 0.0, True, {"timeout": 0.05})
    release.set()
    assert "environment `Hangs` did not return within 0.05 s in step 2 of row 4" in caplog.text
    assert environment.get_reward() == pytest.approx(-0.1)
    pools.give_back([environment])
    assert pools.take([None]) != [environment]


def test_a_reset_that_hangs_is_an_error():
    class Hangs(Guess):
        def reset(self, **row):
            threading.Event().wait(1)

    with pytest.raises(AgentError, match=r"did not return within 0.05 s in reset of row 4"):
        reset(Hangs(), {}, named=False, index=4, limit=0.05)


def test_a_text_environment_must_define_both_methods():
    class Half(TextEnvironment):
        def reset(self, **row):
            return ""

    with pytest.raises(AgentError, match=r"abstract method '?step"):
        EnvironmentPools(Half)


# ---- names ----


def test_environments_from_files(tmp_path, monkeypatch):
    (tmp_path / "game.py").write_text(
        textwrap.dedent(
            """
            from podium import TextEnvironment

            class Guess(TextEnvironment):
                def __init__(self, most=7):
                    self.most = most

                def reset(self, **row):
                    return f"1 to {self.most}?"

                def step(self, text):
                    return None, 1.0, True, {}

            limit = 3
            """
        )
    )
    assert resolve_environment("game.py:Guess", tmp_path)().reset() == "1 to 7?"
    assert resolve_environment("game.py:Guess?most=15", tmp_path)().reset() == "1 to 15?"
    monkeypatch.chdir(tmp_path)
    assert isinstance(resolve_environment("game.py:Guess")(), podium.TextEnvironment)
    for wrong, match in {
        "game.py:Gues": "Did you mean `Guess`",
        "game.py:limit": "an environment is a class",
        "gamr.py:Guess": "Similar: game.py",
        "textarenas:Chess": "Did you mean `textarena`",
        "gymnasium": "environment: gymnasium:FrozenLake-v1",
        "game.py": "is no environment",
    }.items():
        with pytest.raises(ConfigError, match=match):
            resolve_environment(wrong)
    with pytest.raises(AgentError, match="unexpected keyword argument 'least'"):
        EnvironmentPools(resolve_environment("game.py:Guess?least=1"))


def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch):
    import importlib.util

    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "textarena" else find_spec(name))
    with pytest.raises(PodiumError, match=r"textarena is not installed.*\n.*pip install 'podium\[textarena\]'"):
        resolve_environment("textarena:GuessTheNumber-v0")


def test_every_library_has_its_extra():
    import tomllib
    from pathlib import Path

    from podium.agents.table import ADAPTERS

    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    for adapter in (each for each in ADAPTERS.values() if each.package != "podium"):
        [requirement] = extras[adapter.extra]
        assert requirement.replace("-", "_").startswith(adapter.package)
