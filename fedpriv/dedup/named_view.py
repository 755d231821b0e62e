"""Parameters of a built model under other names, as the module that a registry can load stored tensors into."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from fedpriv.errors import InputError


def named_view(parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """A module whose state_dict has the given names, and whose parameters are the given objects.

    `Registry.load_into(view, name)` so changes the live model that the parameters are of: an adapter's, say, by the
    names under which peft stores it. Keep the view for as long as what was loaded is used: the registry takes the
    memory of a view that is gone for other models.

    Args:
        parameters: {name with dots between its parts: parameter}; one parameter may have several names.

    Raises:
        InputError: a name cannot be one of a module's: a part of it is empty, an attribute of every module, or another
            parameter's whole name.
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
