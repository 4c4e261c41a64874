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
    [FAST, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW if case != FAST)],
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
