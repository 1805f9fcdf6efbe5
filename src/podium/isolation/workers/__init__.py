"""Calls into the user's files, in processes that can be killed.

`functions` finds and describes what a file offers, `replies` says what became of a call as plain data, `serve` is the
process, `pool` starts, asks and kills it. Standard library only: a worker imports nothing heavy that the file does not.
"""
