"""What stands around a model: torch.compile's wrapper, which is looked through, and parallel ones, which come later."""

from __future__ import annotations

from torch import nn

PARALLEL = ("DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule")  # the last: made by fully_shard


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ValueError(f"model must be a torch.nn.Module, got {type(model).__name__}")


def uncompiled(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's wrapper, whose paths are those of the plain model."""
    inner = getattr(model, "_orig_mod", None)
    return uncompiled(inner) if isinstance(inner, nn.Module) else model


def check_not_parallel(model: nn.Module) -> None:
    """Raises where the processes would not know of new parameters: what keeps them equal is set up by the wrapper."""
    _check_not_wrapped(model, PARALLEL, "would leave the complement out of step between processes", "inject")
    for path, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor"):
            raise ValueError(f"{path} is sharded over processes: inject before the model is sharded")


def check_not_wrapped(model: nn.Module, call: str) -> None:
    """Raises where the wrapper would wait for gradients that come no longer. Those of fully_shard come as they may."""
    _check_not_wrapped(model, PARALLEL[:2], "counts on gradients of the parameters it was made with", f"call {call}")


def _check_not_wrapped(model: nn.Module, kinds: tuple[str, ...], why: str, call: str) -> None:
    for path, module in model.named_modules():
        name = next((cls.__name__ for cls in type(module).__mro__ if cls.__name__ in kinds), None)
        if name is not None:
            way = "sharded by fully_shard" if name == "FSDPModule" else f"a {name}"
            raise ValueError(f"{path or 'the model'} is {way}, which {why}: {call} before wrapping")
