"""expert_parallel of models of transformers: trainings in one process and on several ranks come to the same numbers."""

import pytest
import torch

import weft
from weft.testing import largest_difference, run_ranks

transformers = pytest.importorskip("transformers")


def _mixtral(implementation="eager", dtype=torch.float64, **options):
    settings = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False,
    }  # fmt: skip
    config = transformers.MixtralConfig(**{**settings, **options})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation).to(dtype)


def _qwen(implementation="eager", dtype=torch.float64):
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, head_dim=8,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2, norm_topk_prob=True,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, experts_implementation=implementation).to(dtype)


def _samples(count):
    return torch.randint(0, 64, (count, 8), generator=torch.Generator().manual_seed(2))


def _loss(model, ids):
    # The model's own loss is computed in float32.
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _alone(build, steps, samples=46, batch=8):
    """Losses, norms and parameters of one process."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    losses, norms = [], []
    while len(norms) < 10:
        batches = list(_samples(samples).split(batch))
        for start in range(0, len(batches), steps):
            window = batches[start : start + steps]
            total = sum(map(len, window))
            for ids in window:
                loss = _loss(model, ids) * len(ids) / total
                loss.backward()
                losses.append(loss.item())
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            if len(norms) == 10:
                break
    return losses, norms, [p.detach() for p in model.parameters()]


def _strategy(model, ctx, name):
    if name == "replicate":
        return weft.replicate(model, ctx)
    return weft.fully_shard(model, ctx)


def _divided(ctx, build, strategy, steps, samples=46, batch=8):
    torch.manual_seed(ctx.rank)
    model = build()
    loader = torch.utils.data.DataLoader(_samples(samples), batch_size=batch // ctx.data_size)
    loader, ctx = weft.shard_data(loader, ctx)
    model, ctx = weft.expert_parallel(model, ctx)
    model, ctx = _strategy(model, ctx, strategy)
    model, loader, ctx = weft.accumulate_grads(model, loader, ctx, steps=steps)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    losses, norms = [], []
    while len(norms) < 10:
        for window in loader:
            for ids in window:
                loss = _loss(model, ids) * window.share
                loss.backward()
                losses.append(weft.reduce(loss.detach(), ctx, "mean").item())
            norms.append(float(weft.clip_grads(model, ctx, max_norm=0.5)))
            optimizer.step()
            optimizer.zero_grad()
            if len(norms) == 10:
                break
    with weft.full_params(model, ctx):
        return losses, norms, [p.detach().clone() for p in model.parameters()]


SLOW = [
    (strategy, mesh, ranks, steps)
    for mesh, ranks in (({"expert": 2}, 2), ({"expert": 4}, 4), ({"data": 2, "expert": 2}, 4))
    for strategy in ("replicate", "fully_shard")
    for steps in (1, 3)
]
FAST = ("fully_shard", {"expert": 2}, 2, 3)


@pytest.mark.parametrize(
    ("strategy", "mesh", "ranks", "steps"),
    [FAST, *(pytest.param(*case, marks=pytest.mark.variant) for case in SLOW if case != FAST)],
)
def test_ten_steps_of_a_mixtral_are_those_of_one_process(strategy, mesh, ranks, steps):
    expected = _alone(_mixtral, steps)
    for losses, norms, parameters in run_ranks(_divided, ranks, _mixtral, strategy, steps, mesh=mesh):
        assert losses == pytest.approx(expected[0], rel=0, abs=1e-12)
        assert norms == pytest.approx(expected[1], rel=0, abs=1e-12)
        assert largest_difference(expected[2], parameters) < 1e-12


def _gradients(ctx, build):
    model, ctx = weft.expert_parallel(build(), ctx)
    model, ctx = weft.replicate(model, ctx)
    ids = _samples(4).chunk(ctx.data_size)[ctx.data_rank]
    _loss(model, ids).backward()
    return weft.full_grads(model, ctx)


def _default():
    """The implementation that transformers takes by default: grouped products, which know no float64."""
    return _mixtral(None, torch.float32)


def _batched():
    return _mixtral("batched_mm")


@pytest.mark.parametrize(("build", "tolerance"), [(_default, 1e-6), (_batched, 1e-12), (_qwen, 1e-12)])
def test_every_implementation_of_experts_computes_the_rows_that_it_receives(build, tolerance):
    model = build()
    _loss(model, _samples(4)).backward()
    for found in run_ranks(_gradients, 2, build, mesh={"expert": 2}):
        for name, p in model.named_parameters():
            assert (found[name] - p.grad).abs().max() < tolerance, name


def _with_router_loss(ctx):
    return weft.expert_parallel(_mixtral(output_router_logits=True), ctx)


def test_the_loss_of_load_balancing_over_the_local_batch_is_refused():
    with pytest.raises(weft.testing.RanksFailed, match="MixtralForCausalLM adds the load balancing loss"):
        run_ranks(_with_router_loss, 2, mesh={"expert": 2})


# -- the loss of load balancing ------------------------------------------------------------------------------


def _ragged():
    """29 rows of which the last tokens do not count, in batches of 8: the last has five."""
    rows = _samples(29)
    return [{"input_ids": ids, "attention_mask": torch.arange(8) < 5 + n % 4} for n, ids in enumerate(rows)]


def _own_loss(model, batch, positions=None):
    """Cross-entropy of the tokens that count, in float64, and what the routers did."""
    routed = []
    kinds = ("MixtralTopKRouter", "Qwen3MoeTopKRouter")
    handles = [
        part.register_forward_hook(lambda part, args, output: routed.append(output))
        for part in model.modules()
        if type(part).__name__ in kinds
    ]
    logits = model(input_ids=batch["input_ids"], position_ids=positions, use_cache=False).logits
    for handle in handles:
        handle.remove()
    scores, _, chosen = zip(*routed, strict=True)
    losses = (
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["input_ids"].flatten(), reduction="none")
        * batch["attention_mask"].flatten()
    )
    return losses.sum(), torch.stack(scores).softmax(-1), torch.stack(chosen)


def _plain_balance(probs, chosen, mask):
    """`load_balancing_loss_func` of transformers, which computes in float32, in plain torch."""
    hits = torch.nn.functional.one_hot(chosen, 4).double().sum(-2)[:, mask]
    return 4 * (hits.mean((0, 1)) * probs[:, mask].mean((0, 1))).sum()


def _balanced_alone(build):
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    losses = []
    for batch in torch.utils.data.DataLoader(_ragged(), batch_size=8):
        mask = batch["attention_mask"].flatten()
        total, probs, chosen = _own_loss(model, batch)
        loss = total / mask.sum() + 0.01 * _plain_balance(probs, chosen, mask)
        loss.backward()
        losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return losses, [p.detach() for p in model.parameters()]


def _balanced(ctx, build, strategy):
    model = build()
    loader = torch.utils.data.DataLoader(_ragged(), batch_size=8 // ctx.data_size)
    loader, ctx = weft.shard_data(loader, ctx)
    axes = [name for name, _ in ctx.axes]
    if "expert" in axes:
        model, ctx = weft.expert_parallel(model, ctx)
    if "context" in axes:
        model, ctx = weft.context_parallel(model, ctx)
    model, ctx = _strategy(model, ctx, strategy)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)
    losses = []
    for whole in loader:
        batch, positions = whole, None
        if "context" in axes:
            ids, mask, positions = weft.data.split_sequence(
                (whole["input_ids"], whole["attention_mask"], torch.arange(8).expand(len(whole["input_ids"]), -1)), ctx
            )
            batch = {"input_ids": ids, "attention_mask": mask}
        mask = batch["attention_mask"].flatten()
        total, probs, chosen = _own_loss(model, batch, positions)
        loss = total / weft.metrics.denominator(mask.sum(), ctx)
        loss = loss + 0.01 * weft.balance_loss(probs, chosen, ctx, mask=mask)
        loss.backward()
        losses.append(weft.reduce(loss.detach(), ctx, "mean").item())
        weft.clip_grads(model, ctx, max_norm=0.5)
        optimizer.step()
        optimizer.zero_grad()
    with weft.full_params(model, ctx):
        return losses, [p.detach().clone() for p in model.parameters()]


BALANCED = [
    (build, strategy, ranks, mesh)
    for strategy, ranks, mesh in (
        ("fully_shard", 2, {"expert": 2}),
        ("replicate", 1, {"data": 1}),
        ("replicate", 2, {"data": 2}),
        ("replicate", 4, {"data": 4}),
        ("fully_shard", 2, {"data": 2}),
        ("fully_shard", 4, {"data": 4}),
        ("replicate", 2, {"expert": 2}),
        ("replicate", 4, {"data": 2, "expert": 2}),
        ("fully_shard", 4, {"data": 2, "expert": 2}),
        ("replicate", 2, {"context": 2}),
        ("fully_shard", 4, {"data": 2, "context": 2}),
    )
    for build in (_mixtral, _qwen)
]


@pytest.mark.parametrize(
    ("build", "strategy", "ranks", "mesh"),
    [BALANCED[0], *(pytest.param(*case, marks=pytest.mark.variant) for case in BALANCED[1:])],
)
def test_training_with_balanced_routers_is_that_of_one_process(build, strategy, ranks, mesh):
    losses, parameters = _balanced_alone(build)
    for found in run_ranks(_balanced, ranks, build, strategy, mesh=mesh):
        assert found[0] == pytest.approx(losses, rel=0, abs=1e-12)
        assert largest_difference(parameters, found[1]) < 1e-10


def _of_transformers(ctx):
    """The loss of the model, with that of its routers taken from `balance_loss`, as the error says."""
    batch = {"input_ids": _samples(6), "attention_mask": torch.arange(8) < torch.tensor([8, 7, 5, 6, 8, 3])[:, None]}
    batch["labels"] = batch["input_ids"].masked_fill(~batch["attention_mask"], -100)
    whole = _mixtral(router_aux_loss_coef=0.01)
    whole(**batch, output_router_logits=True).loss.backward()

    model, inner = weft.expert_parallel(_mixtral(), ctx)
    model, inner = weft.replicate(model, inner)
    model.router_aux_loss_coef = 0.0
    mine = {name: part.chunk(2)[ctx.rank] for name, part in batch.items()}
    count = weft.metrics.denominator((mine["labels"][:, 1:] != -100).sum(), inner)
    output = model(**mine, output_router_logits=True, num_items_in_batch=count)
    probs = torch.stack(output.router_logits).softmax(-1)
    aux = weft.balance_loss(probs, probs.topk(2).indices, inner, mask=mine["attention_mask"].flatten())
    (output.loss + 0.01 * aux).backward()
    found = weft.full_grads(model, inner)
    return max((found[name] - p.grad).abs().max().item() for name, p in whole.named_parameters())


def test_the_loss_of_the_routers_is_that_of_transformers_over_the_whole_batch():
    assert max(run_ranks(_of_transformers, 2, mesh={"expert": 2})) < 1e-7  # it is computed in float32
