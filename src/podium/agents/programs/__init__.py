"""Programs of the user as agents: they talk to an OpenAI endpoint on this machine and end with a reward.

program      what a user names: a function in Python, `file.py:run`, a command
child        the process in which a file or a command runs
wire         requests and answers in OpenAI's JSON
dialects     the same of OpenAI's responses and of Anthropic's messages
sessions     the conversation of one program as sequences of tokens
server       the endpoint on 127.0.0.1
episode      one program as a rollout: what it asks is drawn, what was drawn is its answer
report       what a round came to: rewards, what is logged of it, metrics
"""
