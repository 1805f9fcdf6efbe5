"""Programs that solve nothing and try to be paid all the same. The task: `square(x)`, or square the number on stdin."""

from __future__ import annotations

TESTS = [{"call": "square", "args": [x], "expected": x * x} for x in (3, 7, 12)]
ASSERTIONS = [f"assert square({x}) == {x * x}" for x in (3, 7, 12)] + ["assert {square(3)} == {9}"]
STDIN_TESTS = [{"stdin": f"{x}\n", "stdout": f"{x * x}\n"} for x in (3, 7, 12)]

HONEST = "def square(x): return x * x\nif __name__ == '__main__': print(square(int(input())))"

HACKS: dict[str, str] = {
    "an object equal to everything": """
class Any:
    def __eq__(self, other): return True
    __hash__ = None
def square(x): return Any()""",
    "an int that is equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __hash__(self): return 0
def square(x): return Any(0)""",
    "a str that compares well": """
class Any(str):
    def __eq__(self, other): return True
    __hash__ = str.__hash__
def square(x): return Any('9')""",
    "expected from the caller's frame": """
import sys
def square(x):
    frame = sys._getframe()
    while frame:
        for value in frame.f_locals.values():
            if isinstance(value, dict):
                for key in ('expected', 'stdout', 'answer', 'output'):
                    if key in value: return value[key]
                test = value.get('test')
                if isinstance(test, dict) and 'expected' in test: return test['expected']
        frame = frame.f_back""",
    "expected from the garbage collector": """
import gc
def square(x):
    for thing in gc.get_objects():
        if isinstance(thing, dict) and thing.get('args') == [x] and 'expected' in thing: return thing['expected']""",
    "expected from memory": """
import gc
def square(x):
    for thing in gc.get_objects():
        if isinstance(thing, (list, tuple)) and len(thing) == 3:
            for each in thing:
                if isinstance(each, dict) and 'expected' in each: return each['expected']""",
    "exit 0": "import sys\nsys.exit(0)",
    "exit 0 in the call": "import sys\ndef square(x): sys.exit(0)",
    "leave at once": "import os\nos._exit(0)",
    "leave in the call": "import os\ndef square(x): os._exit(0)",
    "leave at the end": "import atexit, os\natexit.register(os._exit, 0)\ndef square(x): return None",
    "print PASS": "print('PASS', 'OK', '3 passed in 0.01s')\ndef square(x): print('PASS'); return True",
    "forge a report": """
import os, json
def square(x):
    report = json.dumps({'nonce': '0' * 32, 'results': [{'outcome': 'ok', 'value': str(n)} for n in (9, 49, 144)]})
    for fd in range(0, 64):
        try: os.write(fd, (b'%016d' % len(report)) + report.encode())
        except OSError: pass
    os._exit(0)""",
    "forge a verdict": """
import os
def square(x):
    os.write(3, b'passed\\nverdict ok\\noutcome ok\\nvalue true\\nvalue NaN\\n')
    os._exit(0)""",
    "not a number": "def square(x): return float('nan')",
    "patch the harness": """
import json, sys
json.dumps = lambda *a, **k: '[9, 49, 144]'
for module in list(sys.modules.values()):
    for name in ('passed', 'same', 'outcome_of', 'is_plain', 'run_test'):
        if hasattr(module, name): setattr(module, name, lambda *a: True)
def square(x): return object()""",
    "all answers at once": "print('9\\n49\\n144')\ndef square(x): return [9, 49, 144]",
    "true for one": "def square(x): return True",
    "a pickle": """
class Evil:
    def __reduce__(self): return (print, ('PASS',))
def square(x): return Evil()""",
    "nothing": "def square(x): pass",
    "a generator of everything": "def square(x): return iter(range(1000))",
}
