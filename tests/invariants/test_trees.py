"""Trees of any depth, and tokens that the policy did not draw: what plain rows give, one per rollout."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from podium.models.attention import LayerShape, TreeAttention, attention_implementation, tree_attention
from podium.models.devices import KINDS
from podium.models.forward import token_logps
from podium.models.head import LogitScaling, learn_head
from podium.models.packing import Pack, pack, unscored
from podium.models.prefix_tree import lay_out, prefix_tree
from podium.records import Sample
from podium.testing import tiny_model

SHAPES = {
    "plain": LayerShape(scaling=0.4),
    "window": LayerShape(scaling=0.4, window=90),
    "softcap": LayerShape(scaling=0.4, softcap=2.0),
}
EPS = torch.finfo(torch.float32).eps


def grown(rng: np.random.Generator, depth: int, longest: int) -> list[tuple[int, ...]]:
    """Rows of a random tree of so many levels; some end inside it, some are there twice."""

    def below(level: int) -> Iterator[tuple[int, ...]]:
        length = int(np.exp(rng.uniform(0, np.log(longest))))
        segment = tuple(rng.integers(4, 260, length).tolist())
        if level == depth:
            yield segment
            return
        for _ in range(int(rng.integers(1, 4 if level < 4 else 3))):
            yield from (segment + rest for rest in below(level + 1))
        if rng.random() < 0.2:
            yield segment

    rows = [*below(1)]
    return [rows[i] for i in rng.permutation(len(rows))][:9] + rows[:1]


def numbered(
    prompts: Sequence[tuple[int, ...]],
    completions: Sequence[tuple[int, ...]],
    actions: Sequence[np.ndarray] | None = None,
) -> list[Sample]:
    """Samples whose advantages number them, and whose log-probabilities number their drawn tokens."""
    masks = [np.ones(len(ids), bool) for ids in completions] if actions is None else actions
    samples = []
    first = 0
    for r, (prompt, ids, mask) in enumerate(zip(prompts, completions, masks, strict=True)):
        count = int(mask.sum())
        samples.append(
            Sample(
                prompt_ids=prompt,
                token_ids=ids,
                actions=mask,
                advantage=float(r),
                advantages_A=np.full(count, r, np.float32),
                sampled_logps_A=np.arange(first, first + count, dtype=np.float32),
            )
        )
        first += count
    return samples


def rolled(samples: Sequence[Sample], by: int) -> list[Sample]:
    """With action masks that are off by so many tokens."""
    return [dataclasses.replace(sample, actions=np.roll(sample.actions, by)) for sample in samples]


def episodes(rng: np.random.Generator, *, prompts: int = 1) -> list[Sample]:
    """Turns of drawn tokens, with given ones between them, which completions share for a while; one ends in given."""

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(rng.integers(4, 260, count).tolist())

    begun = tokens(40)
    asked = [begun + tokens(9) for _ in range(prompts)]
    turns = [(tokens(14), tokens(n)) for n in (330, 3, 60)]
    completions, drawn = [], []
    for g in range(8):
        shared = turns[: int(rng.integers(0, 4))]
        own = [(tokens(int(rng.integers(1, 20))), tokens(int(rng.integers(1, 90)))) for _ in range(3)]
        told = [*shared, *own][: 1 + g % 5]
        parts = [part for turn in told for part in turn]
        if g != 3:
            parts = parts[:-1]  # it ends with a turn of its own
        completions.append(tuple(itertools.chain(*parts)))
        drawn.append(np.concatenate([np.full(len(part), i % 2 == 0) for i, part in enumerate(parts)]))
    return numbered([asked[g * prompts // 8] for g in range(8)], completions, drawn)


# ---- attention ----


def plain_attention(query: Tensor, key: Tensor, value: Tensor, shape: LayerShape) -> Tensor:
    """One causal row [H, L, D] in float64, with every score in memory."""
    key, value = (x.repeat_interleave(len(query) // len(x), 0) for x in (key, value))
    scores = query @ key.transpose(1, 2) * shape.scaling
    scores = scores if shape.softcap is None else torch.tanh(scores / shape.softcap) * shape.softcap
    distance = torch.arange(len(query[0]))[:, None] - torch.arange(len(query[0]))[None]
    hidden = (distance < 0) | (distance >= (shape.window or 1 << 30))
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ value


@pytest.mark.cases(3)
@pytest.mark.diagonal
@pytest.mark.parametrize("joined", [True, False], ids=["parts", "buckets"])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_attention_over_a_random_tree_is_that_of_its_rows(
    shape: LayerShape, seed: int, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and gradients of queries, keys and values, with sums over all rows that share them."""
    monkeypatch.setitem(KINDS, "cpu", dataclasses.replace(KINDS["cpu"], joined_attention=joined))
    packed = random_pack(seed, longest=350)
    longest = max(len(span.tokens) for span in packed.spans_R)
    given = heads_of(packed)
    for got, wanted in attended(packed, given, shape):
        assert (got - wanted).abs().max() < longest * EPS * max(1.0, float(wanted.abs().max()))


def random_pack(seed: int, longest: int) -> Pack:
    rows = grown(np.random.default_rng(seed), depth=1 + seed, longest=longest)
    [packed] = pack([unscored([1], (*row, 5)) for row in rows], tokens_per_pack=10**6)
    torch.manual_seed(seed)
    return packed


def heads_of(packed: Pack) -> list[Tensor]:
    """Random queries, keys and values, two queries a key."""
    return [torch.randn(heads, len(packed.input_ids_T), 8) for heads in (4, 2, 2)]


def attended(packed: Pack, given: list[Tensor], shape: LayerShape) -> list[tuple[Tensor, Tensor]]:
    """Outputs of each row, then the gradients of `given`: over the tree, and over plain rows in float64."""
    mine, exact = ([x.detach().to(dtype).requires_grad_() for x in given] for dtype in (torch.float32, torch.float64))
    upstream = [torch.randn(len(span.tokens), 4, 8) for span in packed.spans_R]
    output_THD = TreeAttention(packed.layout, "cpu").attend(*mine, shape)
    sum((output_THD[span.tokens] * x).sum() for span, x in zip(packed.spans_R, upstream, strict=True)).backward()
    pairs = []
    for span, weight in zip(packed.spans_R, upstream, strict=True):
        expected = plain_attention(*(x[:, span.tokens] for x in exact), shape).transpose(0, 1)
        (expected * weight).sum().backward()
        pairs.append((output_THD[span.tokens].detach(), expected.detach()))
    return [*pairs, *((x.grad, wanted.grad) for x, wanted in zip(mine, exact, strict=True))]


@pytest.mark.cases(12)
@pytest.mark.defect("AG13", "scores of keys that are large or far apart")
@pytest.mark.parametrize("joined", [True, False], ids=["parts", "buckets"])
@pytest.mark.parametrize("score", [100.0, 1e3, 1e5])
@pytest.mark.parametrize("alike", [True, False], ids=["alike", "far-apart"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_large_scores_keep_value_and_gradient(
    shape: LayerShape, alike: bool, score: float, joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`alike`: the scores of all keys are about as large, as from a large bias; else they lie that far apart.

    Within 1e-4 of plain rows in float64, or 1e-12 where a whole gradient underflows in float32. torch's fused attention
    in float32 is up to three times the queries' gradient away from them at 1e5, and a padded query whose log-sum-exp is
    another row's makes NaN from 88 on.
    """
    monkeypatch.setitem(KINDS, "cpu", dataclasses.replace(KINDS["cpu"], joined_attention=joined))
    for seed in (1, 2, 3):
        packed = random_pack(seed, longest=160)
        query, key, value = heads_of(packed)
        size = (score / shape.scaling) ** 0.5
        if alike:
            common = torch.nn.functional.one_hot(torch.tensor(seed), 8)
            query, key = (torch.where(common.bool(), size, x) for x in (query, key))
        else:
            query, key = query * size / 4, key * size / 4
        for got, wanted in attended(packed, [query, key, value], shape):
            assert (got - wanted).abs().max() <= 1e-4 * wanted.abs().max() + 1e-12


@pytest.mark.parametrize("place", [0, 40, -1])
def test_a_key_that_is_not_finite_shows_in_all_that_see_it(place: int) -> None:
    """No part of a row covers up what another part has made of NaN."""
    [packed] = pack(episodes(np.random.default_rng(0)), tokens_per_pack=10**6)
    for spoilt in (float("nan"), float("inf")):
        query, key, value = heads_of(packed)
        at = packed.spans_R[0].tokens[place]
        key[:, at] = spoilt
        output_THD = TreeAttention(packed.layout, "cpu").attend(query, key, value, SHAPES["plain"])
        for span in packed.spans_R:
            found = np.flatnonzero(span.tokens == at)
            whole = output_THD[span.tokens].isfinite().flatten(1).all(1)
            first = int(found[0]) if len(found) else len(whole)
            assert whole[:first].all()
            assert not whole[first:].any()


@pytest.mark.slow
@pytest.mark.cases(1)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gpt2"])
def test_a_model_with_large_scores_is_as_near_to_float64_as_plain_rows(kind: str) -> None:
    """Turns in deep trees, scores up to 1e5: the products of a model in float32 alone leave plain rows 3e-3 away."""
    model = tiny_model(kind, **({"n_positions": 2048} if kind == "gpt2" else {}))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "q_proj" in name or "c_attn" in name:
                p[..., : p.shape[-1] // (3 if "c_attn" in name else 1)] *= 1e4
    samples = [*episodes(np.random.default_rng(0)), *episodes(np.random.default_rng(1), prompts=3)]

    def gradients(model: nn.Module, run: Callable[[nn.Module, list[Sample]], Tensor]) -> Tensor:
        model.zero_grad()
        return torch.cat([run(model, samples).double(), *(p.grad.double().flatten() for p in trained(model))])

    wanted = gradients(copy.deepcopy(model).double(), plain)
    apart = [float((gradients(model, run) - wanted).norm() / wanted.norm()) for run in (plain, shared)]
    assert apart[1] < max(2 * apart[0], 1e-4)


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


@pytest.mark.parametrize("seed", range(30))
def test_a_tree_holds_its_rows(seed: int) -> None:
    """Every token is a query of one row, sees its whole path, and no part has a position twice."""
    rng = np.random.default_rng(seed)
    rows = [np.array(row) for row in grown(rng, depth=1 + seed % 6, longest=(700, 40, 5)[seed % 3])]
    if seed % 2:
        rows += [np.array(row) for row in grown(rng, depth=2, longest=90)]  # begins otherwise
    layout = lay_out(prefix_tree(rows).blocks, rows)
    for row, path in zip(rows, layout.paths, strict=True):
        assert np.array_equal(layout.token_ids_T[path], row)
        assert np.array_equal(layout.position_T[path], np.arange(len(row)))
    assert sorted({int(t) for path in layout.paths for t in path}) == list(range(len(layout.token_ids_T)))
    assert len(layout.token_ids_T) <= sum(map(len, rows))
    for part in layout.parts():
        for places, own in ((part.query_BL, part.queries_N), (part.key_BK, part.keys_M)):
            used = places.flatten()[own].tolist()
            assert len(set(used)) == len(used)


@pytest.mark.parametrize("seed", range(20))
def test_a_tree_of_some_of_its_rows_is_that_of_them_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [np.array(row) for row in grown(rng, depth=1 + seed % 6, longest=(700, 40, 5)[seed % 3])]
    whole = prefix_tree(rows)
    for first in range(len(rows)):
        for end in range(first + 1, len(rows) + 1):
            cut = whole.between(first, end)
            alone = prefix_tree(rows[first:end])
            assert cut.num_stored == alone.num_stored
            one = lay_out(cut.blocks, rows)
            other = lay_out(alone.blocks, rows[first:end])
            assert np.array_equal(one.token_ids_T, other.token_ids_T)
            assert all(map(np.array_equal, one.paths, other.paths))
            assert len(one.rows) == len(other.rows)


def test_a_long_stem_is_computed_once() -> None:
    """Two completions that part after a call and 900 tokens of a tool, and two that part in the text before it."""
    rng = np.random.default_rng(0)
    call, text = (tuple(rng.integers(4, 260, n).tolist()) for n in (30, 900))
    ends = [tuple(rng.integers(4, 260, 50).tolist()) for _ in range(4)]
    completions = [call + text + ends[0], call + text + ends[1], call + text[:300] + ends[2], call + text[:301]]
    [packed] = pack([unscored((1, 2, 3), ids) for ids in completions], tokens_per_pack=4096)
    assert len(packed.input_ids_T) == 3 + 30 + 900 + 3 * 49


def test_the_parts_of_a_large_group_share_what_they_begin_with() -> None:
    """Cut between completions where the tree, not the sum of its rows, is larger than the budget."""
    rng = np.random.default_rng(0)
    sizes = {}
    for length in (48, 98, 298):
        stem = tuple(rng.integers(4, 260, length).tolist())
        samples = [unscored((1, 2), (*stem, *rng.integers(4, 260, 41).tolist())) for _ in range(12)]
        parts = pack(samples, tokens_per_pack=length + 2 + 5 * 40)
        sizes[length] = [(part.num_rollouts, len(part.input_ids_T)) for part in parts]
    assert sizes[48] == [(5, 250), (5, 250), (2, 130)]
    assert sizes[98] == [(10, 500), (2, 180)], "the budget is 300, and five times the beginning 500"
    assert sizes[298] == [(12, 780)], "of a beginning as long as that, nothing is repeated"


# ---- drawn tokens ----


def plain(model: nn.Module, samples: list[Sample]) -> Tensor:
    """Log-probabilities of the drawn tokens from one eager forward per sample; their weighted sum's gradients."""
    found = []
    with attention_implementation(model, "eager"):
        for sample in samples:
            ids = torch.tensor(sample.prompt_ids + sample.token_ids)
            logp_TV = model(input_ids=ids[None]).logits[0].log_softmax(-1)
            places = len(sample.prompt_ids) + torch.from_numpy(np.flatnonzero(sample.actions))
            logps = logp_TV[places - 1, ids[places]]
            (logps * torch.from_numpy(sample.sampled_logps_A).cos()).sum().backward()
            found.append(logps.detach())
    return torch.cat(found)


def shared(model: nn.Module, samples: list[Sample], *, tokens_per_pack: int = 4096, path: str = "shared") -> Tensor:
    """The same through packs."""
    found, head = [], learn_head(model)
    for packed in pack(samples, tokens_per_pack=tokens_per_pack):
        with tree_attention(model) if path == "shared" else contextlib.nullcontext():
            out = token_logps(model, packed, temperature=1.0, head=head, path=path)
            (out.logps_N * packed.sampled_logps_N.cos()).sum().backward()
        found.append(out.logps_N.detach())
    return torch.cat(found)


def compare(model: nn.Module, samples: list[Sample], run: Callable[[], Tensor]) -> None:
    longest = 1 + max(len(sample.prompt_ids) + len(sample.token_ids) for sample in samples)
    expected = plain(model, samples)
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    got = run()
    assert got.shape == expected.shape
    assert (got - expected).abs().max() < longest * EPS
    whole = float(torch.stack([grad.norm() for grad in wanted.values()]).norm())
    for name, p in model.named_parameters():
        assert float((p.grad - wanted[name]).norm()) < longest * EPS * max(float(wanted[name].norm()), 1e-3 * whole), (
            name
        )
    model.zero_grad()


@pytest.mark.cases(1)
@pytest.mark.diagonal
@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt2"])
def test_drawn_tokens_are_the_targets_of_plain_rows(kind: str, prompts: int) -> None:
    samples = [sample for seed in (0, 1) for sample in episodes(np.random.default_rng(seed), prompts=prompts)]
    model = tiny_model(kind, **({"n_positions": 2048} if kind == "gpt2" else {}))
    for size in (4096, 300):
        compare(model, samples, lambda size=size: shared(model, samples, tokens_per_pack=size))
    if kind != "gemma2":
        compare(model, samples, lambda: shared(model, samples, path="padded"))


@pytest.mark.parametrize("joined", [True, False], ids=["parts", "buckets"])
def test_checkpointed_trees_equal_plain_rows(joined: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KINDS, "cpu", dataclasses.replace(KINDS["cpu"], joined_attention=joined))
    model = tiny_model("qwen3").train()
    samples = episodes(np.random.default_rng(3))

    def run() -> Tensor:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        return shared(model, samples)

    compare(model, samples, run)


@pytest.mark.cases(1)
@pytest.mark.parametrize("by", [-1, 1])
def test_a_mask_off_by_one_is_not_what_plain_rows_give(by: int) -> None:
    samples = episodes(np.random.default_rng(0))
    model = tiny_model("llama")
    with pytest.raises(AssertionError):
        compare(model, samples, lambda: shared(model, rolled(samples, by)))


def check_targets(samples: list[Sample], packs: list[Pack]) -> None:
    """By the definition: token, rollout and the text before each target, and nothing else."""
    found = []
    first = 0
    for packed in packs:
        ids = packed.input_ids_T.numpy()
        for at, target, r in zip(packed.predict_N, packed.target_N, packed.rollout_N, strict=True):
            tokens = packed.spans_R[r].tokens
            before = tokens[: int(np.flatnonzero(tokens == int(at))[0]) + 1]
            found.append((first + int(r), tuple(ids[before].tolist()), int(target)))
        first += packed.num_rollouts
    expected = [
        (r, sample.prompt_ids + sample.token_ids[:t], sample.token_ids[t])
        for r, sample in enumerate(samples)
        for t in np.flatnonzero(sample.actions)
    ]
    assert found == expected


@pytest.mark.parametrize("tokens_per_pack", [1, 300, 4096])
@pytest.mark.parametrize("prompts", [1, 4])
def test_a_given_token_is_an_input_and_never_a_target(prompts: int, tokens_per_pack: int) -> None:
    samples = episodes(np.random.default_rng(5), prompts=prompts)
    check_targets(samples, pack(samples, tokens_per_pack=tokens_per_pack))
    with pytest.raises(AssertionError):
        check_targets(samples, pack(rolled(samples, 1), tokens_per_pack=tokens_per_pack))


def test_given_tokens_at_the_end_are_left_out() -> None:
    masks = [np.array(x, bool) for x in ([1, 1, 0, 0], [0, 0, 0], [0, 1, 0, 1, 0])]
    samples = numbered([(1, 2)] * 3, [(10, 11, 12, 13), (20, 21, 22), (30, 31, 32, 33, 34)], masks)
    [packed] = pack(samples, tokens_per_pack=100)
    assert packed.input_ids_T.tolist() == [1, 2, 10, 30, 31, 32]
    assert list(zip(packed.predict_N.tolist(), packed.target_N.tolist(), strict=True)) == [
        (1, 10), (2, 11), (3, 31), (5, 33)
    ]  # fmt: skip
    assert [x.tolist() for x in packed.split(packed.target_N)] == [[10, 11], [], [31, 33]]
    assert packed.num_rollouts == 3


def test_rollouts_without_drawn_tokens_keep_their_places() -> None:
    """Last in the pack, and alone in one."""
    none = np.zeros(3, bool)
    samples = numbered([(1, 2)] * 2, [(10, 11, 12), (20, 21, 22)], [~none, none])
    [packed] = pack(samples, tokens_per_pack=100)
    assert [len(x) for x in packed.split(packed.target_N)] == [3, 0]
    [nothing] = pack(samples[1:], tokens_per_pack=100)
    model = tiny_model("llama")
    for path in ("shared", "padded"):
        with tree_attention(model) if path == "shared" else contextlib.nullcontext():
            out = token_logps(model, nothing, temperature=1.0, head=LogitScaling(), path=path)
            out.logps_N.sum().backward()
        assert [len(x) for x in nothing.split(out.logps_N)] == [0]


def test_prompts_that_differ_in_a_group_share_what_they_begin_with() -> None:
    begun = tuple(range(4, 64))
    prompts = [(*begun, 100, 101)] * 2 + [(*begun, 110, 111)] * 2
    completions = [(200, 1), (201, 1), (200, 1), (202, 1)]
    [packed] = pack(numbered(prompts, completions), tokens_per_pack=4096)
    assert len(packed.input_ids_T) == 60 + 2 * (2 + 2)
    assert [span.prompt_length for span in packed.spans_R] == [62] * 4
    assert packed.advantages_R.tolist() == [0, 1, 2, 3]
