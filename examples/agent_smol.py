"""A `CodeAgent` of smolagents: it answers in code, which runs in Podium's sandbox in place of smolagents' interpreter.

    pip install "smolagents[openai]"
    podium train examples/agent_smol.yaml

`retry=False`: where an episode has had its turns the endpoint answers 429, after which smolagents would wait a minute.
"""

from smolagents import CodeAgent, LogLevel, OpenAIServerModel
from smolagents.local_python_executor import CodeOutput, PythonExecutor
from smolagents.memory import ActionStep, TaskStep, Timing
from smolagents.utils import AgentError

from podium.isolation.sandbox import choose, run_program

SANDBOX = choose("auto")
TEMPLATES = {
    "system_prompt": "Solve the task with Python code between <code> and </code>, and call final_answer.",
    "planning": dict.fromkeys(("initial_plan", "update_plan_pre_messages", "update_plan_post_messages"), ""),
    "managed_agent": {"task": "", "report": ""},
    "final_answer": {"pre_messages": "Answer the task.", "post_messages": "{{task}}"},
}
"""smolagents' own prompts have more than two thousand tokens, too many for a small model."""
WORKED = {
    "What is 31 + 12?": "final_answer(31 + 12)",
    "What is 75 - 8?": "final_answer(75 - 8)",
    "What is 6 * 50?": "final_answer(6 * 50)",
}


class Sandbox(PythonExecutor):
    """Runs the code of each step by itself, without files and network."""

    def send_tools(self, tools): ...

    def send_variables(self, variables): ...

    def __call__(self, code_action):
        program = f"def final_answer(answer):\n    print('FINAL', answer)\n{code_action}"
        [result] = run_program(program, [{"stdin": ""}], backend=SANDBOX)
        if result.outcome != "ok":
            raise RuntimeError(result.error or result.outcome)
        logs, _, answer = result.stdout.rstrip().rpartition("FINAL ")
        return CodeOutput(answer, logs, is_final_answer="FINAL" in result.stdout)


def run(base_url, api_key, row, answer):
    """0.1 for code, 0.3 for code that ran, 1 for the right answer."""
    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key, retry=False, max_tokens=32)
    agent = CodeAgent([], model, TEMPLATES, executor=Sandbox(), max_steps=1, verbosity_level=LogLevel.OFF)
    for task, code in WORKED.items():  # as if it had solved these before
        agent.memory.steps += [TaskStep(task), ActionStep(1, Timing(0.0), model_output=f"<code>{code}</code>")]
    try:
        given = agent.run(row["prompt"][-1]["content"], reset=False)
    except AgentError:
        given = None
    steps = [step for step in agent.memory.steps if getattr(step, "code_action", None)]
    ran = any(step.error is None for step in steps)
    return {"code": 0.1 * bool(steps), "ran": 0.2 * ran, "answer": 0.7 * (ran and given == answer)}
