"""What errors of torch mean that programs meet: a peer is lost, or plain tensors stand beside DTensors."""

from __future__ import annotations

import re
import traceback

import torch
import torch.distributed as dist
from torch import nn

from weft.errors import ContractError

_COMMUNICATION_SIGNS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "Timed out waiting",
    "Socket Timeout",
    "NCCL",
    "ProcessGroup",
    "gloo",
)
_OF_LOGITS = 'weft.collectives.vocab_cross_entropy(logits, labels, ctx)  # of a head of style "vocab"'
OF_LINEAR_LOSS = (
    "loss = F.linear_cross_entropy(hidden, head.weight, labels, options=torch.nn.LinearCrossEntropyOptions())  "
    "# without label_smoothing"
)
_IN_FORWARD = (
    "call the layers that have the parameters, such as self.head(x) with self.head.weight = self.embedding.weight, in "
    "place of F.linear(x, self.embedding.weight); or leave these layers out of the plan; .full_tensor() for each "
    "term of a loss over parameters"
)
_ELSEWHERE = (
    "weft.clip_grads(model, ctx, max_norm=1.0), or max_value=, before optimizer.step(); weft.full_params(model, ctx) "
    "for parameters; penalty.full_tensor() for each term of a loss over them, or weight_decay= of an optimizer"
)
_OF_METHOD = (
    'model, ctx = weft.fully_shard(model, ctx, methods=("{}",))  # the method that is called; or call the model; of a '
    "method that calls it in a loop, such as generation: with weft.full_params(model, ctx, forward=True): ..."
)
_OF_LAYERS = re.compile(r"aten\.(\w*convolution|embedding|(add|b|)mm|mv|native_\w+_norm)\b")
_OF_FOLLOWER = (
    "teacher, ctx = weft.fully_shard(teacher, ctx)  # what follows weights takes their strategy; or "
    "weft.average_weights; state = torch.zeros_like(p) in an optimizer of your own"
)
_IN_PLACE = re.compile(r"aten\.(_foreach_)?(add|sub|lerp)\w*_\b")


def is_communication_error(error: BaseException) -> bool:
    """Say whether `error` is what torch.distributed raises when a peer is lost."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _COMMUNICATION_SIGNS)


def mixed_kinds_error(error: BaseException, *, in_forward: bool = False) -> ContractError | None:
    """What to raise for an error of torch's; None if it is about something else.

    Args:
        error: Of torch: plain tensors and DTensors, or DTensors over several meshes.
        in_forward: Whether a module's forward raised it.
    """
    text = str(error)
    if not isinstance(error, (RuntimeError, ValueError)) or not any(word in text for word in ("DTensor", "DeviceMesh")):
        return None
    frames = traceback.walk_tb(error.__traceback__)
    if not any(said in text for said in ("got mixed torch.Tensor and DTensor", "must have the same mesh")) and not any(
        frame.f_globals.get("__name__") == "torch.nn.utils.clip_grad" for frame, _ in frames
    ):
        return None
    return ContractError(
        "torch computes with tensors of one kind: all whole, or all DTensors over one mesh",
        found=str(error).splitlines()[0],
        expected="a function that knows which tensors are sharded over which ranks, or a term of a loss over "
        "parameters of one kind",
        fix=_line_for(error, in_forward=in_forward),
    )


def _line_for(error: BaseException, *, in_forward: bool) -> str:
    if is_of_linear_loss(error):
        return OF_LINEAR_LOSS
    if "nll_loss" in str(error):
        return _OF_LOGITS
    if in_forward:
        return _IN_FORWARD
    if _OF_LAYERS.search(str(error)):
        return _OF_METHOD.format(_called_method(error))
    return _OF_FOLLOWER if _IN_PLACE.search(str(error)) else _ELSEWHERE


def _called_method(error: BaseException) -> str:
    """The method of a module, besides forward, that a program has called."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        code, home = frame.f_code, str(frame.f_globals.get("__name__")).partition(".")[0]
        owner = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(owner, nn.Module) and home not in ("torch", "weft") and code.co_name != "forward":
            return code.co_name
    return "encode"


def is_of_linear_loss(error: BaseException) -> bool:
    """Whether `F.linear_cross_entropy` raised it where it makes all logits at once: without options, say."""
    codes = [frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [code.co_name for code in codes if code.co_filename == torch.nn.functional.__file__]
    return names[-1:] == ["linear_cross_entropy"]
