"""`fedpriv dedup restore|verify|list|remove|gc`: what is done with a store of variants."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from fedpriv.cli._command import Result, StorePath, check_new_file, table

_COLUMNS = (
    *("name", "bytes_own", "num_blocks", "num_shared", "epsilon_before", "epsilon_after"),
    *("accuracy", "perplexity", "bases"),
)


def restore(
    store: StorePath,
    name: Annotated[str, typer.Argument(help="Name of the variant.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
) -> Result:
    """Write a stored variant as an ordinary safetensors file, bit for bit as it was validated.

    Example: fedpriv dedup restore store round-20 --out round-20.safetensors
    """
    import safetensors.numpy

    from fedpriv.files import new_file
    from fedpriv.models.variants.store import Store

    check_new_file(out)
    with Store(store, read_only=True) as opened:
        tensors = opened.tensors(name)
    with new_file(out) as file:
        safetensors.numpy.save_file(tensors, file.name)
    return Result({"name": name, "file": str(out), "num_tensors": len(tensors)}, [f"{len(tensors)} tensors in {out}"])


def verify(store: StorePath) -> Result:
    """Check that every block, manifest and extra tensor of a store is as it was written. Exit code 1 if not.

    Example: fedpriv dedup verify store
    """
    from fedpriv.models.variants.store import Store

    with Store(store, read_only=True) as opened:
        damage, names = opened.verify(), opened.names
    sound = [f"{len(names)} variants, all sound"]
    return Result({"names": names, "damage": damage}, damage or sound, code=1 if damage else 0)


def list_(store: StorePath) -> Result:
    """The variants of a store: bytes and blocks of their own, epsilon and accuracy, and whose blocks they may hold.

    Example: fedpriv dedup list store
    """
    from fedpriv.models.variants.store import Store
    from fedpriv.models.variants.stored import stored_models

    with Store(store, read_only=True) as opened:
        models = stored_models(opened)
        summary = {"bytes_stored": opened.bytes_stored, "bytes_logical": opened.bytes_logical}
    rows = [asdict(model) | {"bases": ", ".join(model.bases)} for model in models]
    lines = [*table(rows, _COLUMNS), f"{summary['bytes_stored']} of {summary['bytes_logical']} bytes stored"]
    return Result({"variants": [asdict(model) for model in models], **summary}, lines)


def remove(
    store: StorePath,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of the variants.")],
) -> Result:
    """Remove variants, but no base of one that stays; `gc` then frees the space that only they used.

    Example: fedpriv dedup remove store client-2 client-3
    """
    from fedpriv.models.variants import stored
    from fedpriv.models.variants.store import Store

    _check_store(store)
    with Store(store) as opened:
        stored.remove(opened, names)
        left, kept_values = opened.names, stored.kept_for_others(opened, names)
    lines = [f"{len(left)} variants left: {', '.join(left) or 'none'}"]
    for name, others in kept_values.items():
        lines.append(f"note: the values of {name} stay in the store, since {', '.join(others)} are restored with them")
    return Result({"removed": names, "left": left, "kept_for_others": kept_values}, lines)


def gc(store: StorePath) -> Result:
    """Free the space of blocks that no variant uses any more.

    Example: fedpriv dedup gc store
    """
    from fedpriv.models.variants.store import Store

    _check_store(store)
    with Store(store) as opened:
        before = opened.bytes_stored
        num_blocks = opened.compact()
        freed, left = before - opened.bytes_stored, opened.bytes_stored
    values = {"num_blocks": num_blocks, "bytes_freed": freed, "bytes_stored": left}
    return Result(values, [f"{num_blocks} blocks dropped, {freed} bytes given back, {left} left"])


def _check_store(store: Path) -> None:
    """Refuse a folder that is no store, which opening it for writing would make one."""
    from fedpriv.models.variants.store import Store

    Store(store, read_only=True).close()
