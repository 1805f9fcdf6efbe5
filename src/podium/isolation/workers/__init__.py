"""Calls into code of others, in processes that can be killed.

`process` is the harness: it starts, calls and kills; `child` is the process. For functions in the user's files `calls`
answers there, `functions` fills in arguments and describes, `call_result` is what a call gave, as plain data. Standard
library only: a worker imports nothing heavy that its target does not.
"""
