"""Changes of a finished model of ``transformers`` that take one special thing away."""

from collections.abc import Callable

import torch


def zero(*endings: str) -> Callable[[torch.nn.Module], None]:
    """Sets the parameters whose names end so to 0; one ending at least must be there."""

    def change(model: torch.nn.Module) -> None:
        found = [p for name, p in model.named_parameters() if name.endswith(endings)]
        assert found, endings
        for parameter in found:
            parameter.data.zero_()

    return change


def identity(*endings: str) -> Callable[[torch.nn.Module], None]:
    """Puts an identity in the place of the modules whose names end so."""

    def change(model: torch.nn.Module) -> None:
        found = [name for name, _ in model.named_modules() if name.endswith(endings)]
        assert found, endings
        for name in found:
            model.set_submodule(name, torch.nn.Identity())

    return change


def swap_key_heads(model: torch.nn.Module) -> None:
    """The two key-value heads change places: what comes out if they are dealt to the query heads in another way."""
    for name, parameter in model.named_parameters():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            parameter.data = parameter.data.roll(parameter.shape[0] // 2, 0)


def norm_per_head(model: torch.nn.Module) -> None:
    """Norms of q and k over each head by itself in place of the whole projection."""

    class PerHead(torch.nn.Module):
        def __init__(self, norm: torch.nn.Module) -> None:
            super().__init__()
            self.norm = norm

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.unflatten(-1, (-1, 4))
            scale = torch.rsqrt(heads.pow(2).mean(-1, keepdim=True) + self.norm.variance_epsilon)
            return (heads * scale).flatten(-2) * self.norm.weight

    for name, module in list(model.named_modules()):
        if name.endswith(("q_norm", "k_norm")):
            model.set_submodule(name, PerHead(module))


def untied(model: torch.nn.Module) -> None:
    """A head of its own, the embedding's rows in another order."""
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(head.weight.data.roll(1, 0).clone())


def no_embedding_scale(model: torch.nn.Module) -> None:
    model.model.embed_tokens.embed_scale.fill_(1.0)


def plain_norm_weight(model: torch.nn.Module) -> None:
    """The norm multiplies by its weight, not by 1 + weight."""
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data -= 1.0
