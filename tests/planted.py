"""Plant faults in copies of the package, one at a time, and see that tests find each: `python -m tests.planted`.

    python -m tests.planted                  # all of them, about ten minutes on two cores
    python -m tests.planted sign secret      # those whose name contains one of these words

A fault is a text of the source that stands there once, and what takes its place; it is found wherever its file is.
The tests named with it must pass without the fault and fail with it. Exit code 1: one was not found.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORKERS = 2


@dataclass(frozen=True, slots=True)
class Fault:
    """A change of the source that must not go unnoticed."""

    name: str
    old: str
    new: str
    tests: str
    """Arguments of pytest."""


LOSSES, PACKS, SAMPLING = (
    "tests/unit/test_losses.py",
    "tests/invariants/test_trees.py",
    "tests/invariants/test_sampling.py",
)
ALL = "-m ''"
"""Also those that `make test` leaves out: of some parameters it takes a few."""
TRAINER = "tests/invariants/test_trainer.py"
STATES, WHOLE = "tests/invariants/test_architectures.py", "tests/e2e/test_vision_checkpoints.py"

FAULTS = (
    Fault(
        "sign of the advantages",
        "return np.where(scored & (top - bottom <= REL_EPS * size_P1), 0.0, x_PG - mean)",
        "return np.where(scored & (top - bottom <= REL_EPS * size_P1), 0.0, mean - x_PG)",
        "tests/unit/test_advantages.py",
    ),
    Fault(
        "deviation with n instead of n - 1",
        "np.maximum(count - 1, 1)\n    return np.where(count > 1",
        "np.maximum(count, 1)\n    return np.where(count > 1",
        "tests/unit/test_advantages.py",
    ),
    Fault(
        "a reward of None counts as 0",
        "numbers = tuple(math.nan if value is None or r in failed else value",
        "numbers = tuple(0.0 if value is None or r in failed else value",
        "tests/unit/test_score.py",
    ),
    Fault(
        "the optimistic clip",
        "-torch.minimum(_bounded(ratio_N, s) * x.advantages_N, clipped_N * x.advantages_N)",
        "-torch.maximum(_bounded(ratio_N, s) * x.advantages_N, clipped_N * x.advantages_N)",
        LOSSES,
    ),
    Fault("sign of the KL", "loss_N = loss_N + s.beta * kl_N", "loss_N = loss_N - s.beta * kl_N", LOSSES),
    Fault(
        "reference and policy swapped in the KL",
        "log_r_N = x.ref_logps_N - x.logps_N",
        "log_r_N = x.logps_N - x.ref_logps_N",
        LOSSES,
    ),
    Fault(
        "tokens predicted by the wrong position",
        "predicting=start + drawn - 1,",
        "predicting=start + drawn,",
        PACKS,
    ),
    Fault(
        "tokens that tools gave are trained on",
        "drawn = np.flatnonzero(sample.actions)",
        "drawn = np.arange(len(sample.actions))",
        "tests/parity/test_turns.py -k tools_move_weights",
    ),
    Fault(
        "mask of a turn shifted by one",
        "actions=np.array(sequence.action_mask, bool)",
        "actions=np.roll(np.array(sequence.action_mask, bool), 1)",
        "tests/unit/test_agents_training.py",
    ),
    Fault(
        "no temperature in training",
        "return LogitScaling(self.scale / temperature, self.cap)",
        "return LogitScaling(self.scale, self.cap)",
        "tests/invariants/test_head.py",
    ),
    Fault(
        "completions of a prompt share their random numbers",
        "counters = positions_R.astype(np.uint64) + np.uint64(1)\n    words = mix(keys_R + counters * _GOLDEN)",
        "counters = positions_R.astype(np.uint64) + np.uint64(1)\n    words = mix(keys_R[:1] + counters * _GOLDEN)",
        SAMPLING,
    ),
    Fault(
        "top-p leaves the unlikely tokens",
        "unlikely = ordered.softmax(-1).cumsum(-1) <= 1 - settings.top_p",
        "unlikely = ordered.softmax(-1).cumsum(-1) > 2 - settings.top_p",
        f"{SAMPLING} -k distribution {ALL}",
    ),
    Fault(
        "a completion goes on behind its end",
        "if row.token_ids[-1] not in row.settings.end_ids and row.num_drawn < row.request.max_tokens:",
        "if row.num_drawn < row.request.max_tokens:",
        "tests/invariants/test_live_engine.py",
    ),
    Fault(
        "groups of a pack see each other",
        "positions.append(np.arange(segment.start, segment.stop))",
        "positions.append(np.arange(segment.stop - segment.start))",
        PACKS,
    ),
    Fault(
        "completions begin without the state of their prompt",
        "None if before is None else taken(before, parent_B)",
        "None",
        STATES,
    ),
    Fault(
        "a convolution sees nothing of the row before",
        "behind = row.path[max(0, row.start - before) :]\n        first = before - min(row.start, before)",
        "behind = row.path[row.start :]\n        first = before",
        STATES,
    ),
    Fault("states stay where they were as rows move", "        self.states.move(rows)\n", "", STATES),
    Fault(
        "a state is taken back to an earlier token",
        "if self.rewinds or behind >= self._cached(kept[i])",
        "if kept[i]",
        STATES,
    ),
    Fault(
        "sinks have no gradient",
        "by_sink = -((sinks_H - lse_TH).exp_() * (grads[0] * output_THD).sum(-1)).sum(0)",
        "by_sink = torch.zeros_like(sinks_H)",
        f"{STATES} -k 'plain_rows and gpt_oss' {ALL}",
    ),
    Fault(
        "an encoder of images is trained",
        "        parameter.requires_grad_(False)\n    return sum(",
        "        parameter.requires_grad_(True)\n    return sum(",
        WHOLE,
    ),
    Fault(
        "an encoder of images is not saved",
        "return {name: one(name, tensor) for name, tensor in tensors.items()}",
        "return {name: one(name, tensor) for name, tensor in tensors.items() if name not in found}",
        WHOLE,
    ),
    Fault(
        "a damaged checkpoint verifies",
        "elif _sha256(path) != digest:",
        "elif not digest:",
        "tests/system/test_resume.py -k damaged",
    ),
    Fault(
        "files of a checkpoint are not flushed",
        "        os.fsync(descriptor)",
        "        pass",
        "tests/unit/test_run.py -k flushed",
    ),
    Fault(
        "random numbers are not restored",
        "super()._load_rng_state(checkpoint)",
        "pass",
        f"tests/system/test_resume.py -k 'given_step and ahead-6' {ALL}",
    ),
    Fault(
        "not finite is never found (M131)",
        "bad = [name for name in names if not np.isfinite(now.get(name, 0.0))]",
        "bad = list[str]()",
        "tests/unit/test_monitors.py",
    ),
    Fault(
        "frozen weights are never found (M138)",
        'if len(signal) < 3 or any(row["health/moved_share"] > 0 for row in signal):',
        "if len(signal) < 3 or signal:",
        "tests/unit/test_monitors.py",
    ),
    Fault(
        "a step that is not finite is applied",
        "finite = norm is None or math.isfinite(norm)",
        "finite = True",
        "tests/invariants/test_non_finite.py",
    ),
    Fault(
        "a secret is printed",
        "text = _ASSIGNED.sub(assigned, _TEXT.sub(mark, text))",
        "text = _ASSIGNED.sub(assigned, text)",
        "tests/unit/test_redaction.py",
    ),
    Fault(
        "escape sequences of a model reach the terminal",
        'return _CONTROLS.sub("", _ESCAPES.sub("", text))',
        "return text",
        "tests/unit/test_cli.py src/podium/records.py",
    ),
    Fault(
        "half of the held-out prompts are trained on",
        "return int(fingerprint(question)[:16], 16) < share * 2**64",
        "return int(fingerprint(question)[:16], 16) < share * 2**63",
        "tests/unit/test_data.py src/podium/data/selection.py",
    ),
    Fault(
        "intervals half as wide",
        "half = z / (1 + z**2 / count) * math.sqrt(",
        "half = z / 2 / (1 + z**2 / count) * math.sqrt(",
        "tests/unit/test_evaluation_statistics.py src/podium/evaluation/statistics.py",
    ),
    Fault(
        "a gate is met by its last value alone",
        "last = list(values)[-self.steps :]\n        if len(last) < self.steps:",
        "last = list(values)[-1:]\n        if len(last) < 1:",
        "tests/unit/test_gates.py",
    ),
    Fault(
        "tags of YAML are taken",
        'if node.tag != f"tag:yaml.org,2002:{kind}":',
        "if not node.tag:",
        "tests/unit/test_document.py",
    ),
    Fault(
        "a program passes with any output",
        'return _lines(result.stdout) == _lines(str(test["stdout"]))',
        "return bool(result.stdout)",
        "tests/security/test_sandbox.py -k no_hack",
    ),
    # ---- losses ----
    Fault(
        "GSPO's ratio is not divided by the length",
        "log_ratio_N = x.mean_per_rollout(log_ratio_N)[x.rollout_N]",
        "log_ratio_N = x.sum_per_rollout(log_ratio_N)[x.rollout_N]",
        LOSSES,
    ),
    Fault(
        "Dr. GRPO divides by no length",
        "((x.num_rollouts or 1.0) * s.max_completion_length)",
        "(x.num_rollouts or 1.0)",
        LOSSES,
    ),
    Fault(
        "CISPO's ratio has a gradient",
        "return -ratio_N.clamp(max=s.epsilon_high).detach() * x.advantages_N * x.logps_N",
        "return -ratio_N.clamp(max=s.epsilon_high) * x.advantages_N * x.logps_N",
        LOSSES,
    ),
    Fault(
        "the off-policy mask drops good rollouts",
        "return (x.advantages_R >= 0) | (drift_R <= threshold)",
        "return drift_R <= threshold",
        LOSSES,
    ),
    Fault(
        "the correction divides by the policy",
        "x.old_logps_N) - x.sampled_logps_N",
        "x.old_logps_N) * 0 + x.sampled_logps_N - x.logps_N",
        LOSSES,
    ),
    Fault(
        "the entropy bonus is a penalty",
        "policy - entropy_coef * mean_entropy(x)",
        "policy + entropy_coef * mean_entropy(x)",
        LOSSES,
    ),
    Fault(
        "tokens of low entropy are kept",
        "torch.quantile(over_X, 1 - top_quantile)",
        "torch.quantile(over_X, top_quantile)",
        LOSSES,
    ),
    Fault(
        "samples without an advantage have no KL",
        "return s.beta == s.observation_coef == 0 and",
        "return s.observation_coef == 0 and",
        LOSSES,
    ),
    Fault(
        "a rollout's mean counts by its length",
        "return x.mean_per_rollout(loss_N).sum() / (x.num_rollouts or 1.0)",
        "return x.sum_per_rollout(loss_N).sum() / (x.num_rollouts or 1.0)",
        LOSSES,
    ),
    # ---- the step ----
    Fault(
        "reused rollouts have no old log-probabilities",
        "if run.plan.reuses_rollouts and not is_stale:",
        "if False:",
        "tests/parity/test_first_step.py",
    ),
    Fault(
        "stale rollouts count as fresh",
        "is_stale = scored.staleness > 0",
        "is_stale = False",
        "tests/e2e/test_async_rollouts.py",
    ),
    Fault(
        "the policy is its own reference",
        "ref = run.step.logps(samples, reference)",
        "ref = run.step.logps(samples)",
        "tests/e2e/test_training.py -k 'kl_is_to_the_weights'",
    ),
    Fault(
        "truncated completions alone are trained on",
        "(args.mask_truncated_completions & table.truncated_R)",
        "(args.mask_truncated_completions & ~table.truncated_R)",
        f"tests/parity/test_first_step.py -k mask_truncated {ALL}",
    ),
    Fault(
        "dynamic sampling keeps groups of equal rewards",
        "if i not in chosen or differs(group):",
        "if i not in chosen:",
        "tests/e2e/test_training.py -k dynamic_sampling",
    ),
    Fault(
        "a share has the tokens of all shares",
        "num_tokens=int(counted_PG[share_PG == s].sum()),",
        "num_tokens=int(counted_PG.sum()),",
        "tests/parity/test_first_step.py",
    ),
    Fault(
        "the order of rows is that of another epoch",
        "rng = np.random.default_rng([self.seed, key.epoch])\n",
        "rng = np.random.default_rng([self.seed])\n",
        "tests/e2e/test_training.py -k an_order_of_its_own",
    ),
    Fault(
        "the optimizer of a loop steps with what is not finite",
        "if trained and math.isfinite(norm):",
        "if trained:",
        "tests/e2e/test_loop.py",
    ),
    # ---- play ----
    Fault(
        "random numbers of a turn begin again",
        "position=request.position + len(token_ids),",
        "position=request.position,",
        "tests/invariants/test_turns.py tests/unit/test_play.py",
    ),
    Fault(
        "an ended text counts as truncated",
        'finish: Finish = "stop" if settings.has_ended(token_ids, text) else "length"',
        'finish: Finish = "length"',
        "tests/invariants/test_live_engine.py tests/parity/test_first_step.py tests/unit/test_play.py",
    ),
    Fault(
        "requests go in the order of answers",
        "for _, run in sorted(self.asking.items()) for",
        "for _, run in reversed(self.asking.items()) for",
        "tests/unit/test_play.py tests/invariants/test_turns.py",
    ),
    Fault(
        "rollouts that failed are not closed",
        "            if run.going is None:\n                run.rollout.close()",
        "            if run.going is None:\n                pass",
        "tests/unit/test_play.py",
    ),
    Fault(
        "a reply may take the place of the answer",
        'return suffix, "length" if len(suffix) == left else None',
        "return suffix, None",
        "tests/unit/test_play.py",
    ),
    # ---- saving ----
    Fault(
        "the coefficient of entropy is not saved",
        'EntropyControl(**{k: math.inf if v is None else v for k, v in saved["entropy"].items()})',
        "entropy",
        f"tests/system/test_resume.py {ALL} -k entropy",
    ),
    Fault(
        "the optimizer of a loop is not loaded",
        "self.optimizer.load_state_dict(torch.load(folder / OPTIMIZER, weights_only=True))",
        "pass",
        "tests/e2e/test_loop.py",
    ),
    Fault(
        "a failed load leaves half of the weights", "if always or not is_done:", "if always:", "tests/e2e/test_loop.py"
    ),
    Fault(
        "the newest checkpoint is taken unread",
        'if (wrong := damage(checkpoint) or _no_step(checkpoint / "trainer_state.json")) is None:',
        'if (wrong := _no_step(checkpoint / "trainer_state.json")) is None:',
        "tests/system/test_resume.py -k damaged",
    ),
    Fault(
        "the best checkpoint is rotated away",
        "order = sorted(newest, key=lambda one: one != newest[0] and not _is(one, best))",
        "order = newest",
        "tests/unit/test_run.py tests/system/test_resume.py tests/unit/test_long_runs.py",
    ),
)


def main(words: list[str]) -> int:
    """Print a line for each fault; 1 where one was not found."""
    chosen = [fault for fault in FAULTS if not words or any(word in fault.name for word in words)]
    with ThreadPoolExecutor(WORKERS) as pool:
        missed = 0
        for fault, said in zip(chosen, pool.map(tried, chosen), strict=True):
            missed += said != "found"
            print(f"{said:12} {fault.name}", flush=True)
    print(f"{len(chosen) - missed} of {len(chosen)} faults are found")
    return int(bool(missed))


def tried(fault: Fault) -> str:
    """`found`, or what became of the fault."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
        holding = [path for path in Path(folder, "src").rglob("*.py") if fault.old in path.read_text(encoding="utf-8")]
        if len(holding) != 1 or holding[0].read_text(encoding="utf-8").count(fault.old) != 1:
            return "NOT PLANTED"
        holding[0].write_text(holding[0].read_text(encoding="utf-8").replace(fault.old, fault.new), encoding="utf-8")
        return {0: "MISSED", 1: "found"}.get(_pytest(fault.tests, Path(folder)), "NO TESTS")


def _pytest(tests: str, folder: Path) -> int:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "not slow",
        "-p",
        "no:cacheprovider",
        *shlex.split(tests),
    ]
    env = {**os.environ, "PYTHONPATH": str(folder / "src")}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
