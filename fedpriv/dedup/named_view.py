"""A built model's parameters under other names, as a module into which a registry can load stored tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fedpriv.errors import InputError


def named_view(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module whose state_dict has the given names, and whose parameters are the given objects.

    So `Registry.load_into(view, name)` changes the live model that owns the parameters, for instance an adapter by
    the names under which peft stores it. Keep the view for as long as the loaded weights are in use: once it is
    gone, the registry reuses its memory for other models.

    Args:
        parameters: {dotted name: parameter}; one parameter may have several names.

    Raises:
        InputError: a name is not valid in a module: a part of it is empty, is an attribute of every module, or is
            the full name of another parameter.
    """
    view = nn.Module()
    for name, parameter in parameters.items():
        *path, last = name.split(".")
        module = view
        try:
            for part in path:
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(last, parameter)
        except KeyError as error:
            raise InputError(f"parameter {name!r}: cannot be in a module ({error.args[0]})") from None
    return view.eval()
