"""`fedpriv export`, `card` and `push`: a run's models for people who do not have the run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedpriv.cli.options import ModelName, SavedModel, VariantName
from fedpriv.cli.output import AsJson, show, table

License = Annotated[
    str, typer.Option("--license", help="The Hub's identifier of a license, such as apache-2.0; by default none.")
]


def export(
    source: SavedModel,
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")],
    variant: VariantName = "",
    model: ModelName = "",
    as_json: AsJson = False,
) -> None:
    """Write a run's model as a folder that loads without fedpriv and answers as `fedpriv predict` does.

    A classifier of pooled texts becomes a sentence-transformers model, any other a transformers model, with the
    adapter merged in float32. Its README.md shows how to use it.

    Example: fedpriv export results/20261121-042553-embedded model-for-everyone
    """
    from fedpriv.publishing import saved
    from fedpriv.publishing.export import check_new, form_of
    from fedpriv.publishing.export import export as export_to

    check_new(out)
    found = saved.find(source, variant=variant, model=model)
    form = form_of(found)
    export_to(saved.load(found), out)
    values = {"out": str(out), "variant": found.name, "library": form}
    show(values, [f"{out}: {found.name} as a {form} model; {out / 'README.md'} shows how to use it"], as_json)


def card(
    source: SavedModel,
    variant: VariantName = "",
    write: Annotated[bool, typer.Option("--write", help="Write README.md beside the variant instead.")] = False,
    license: License = "",
    as_json: AsJson = False,
) -> None:
    """Print the model card of a run's variant, or write it anew: what it cost, what it is for, in the Hub's format.

    Example: fedpriv card results/20261121-042553-embedded
    """
    from fedpriv.publishing import card as cards
    from fedpriv.publishing import saved

    found = saved.find(source, variant=variant)
    if write:
        path = str(cards.write_one(found, license=license))
        show({"variant": found.name, "card": path}, [path], as_json)
        return
    text = cards.text(found, license=license)
    show({"variant": found.name, "card": text}, [text.rstrip("\n")], as_json)


def push(
    source: SavedModel,
    name: Annotated[str, typer.Argument(metavar="NAME", help="OWNER/NAME of the repository on the Hub.")],
    variant: VariantName = "",
    yes: Annotated[bool, typer.Option("--yes", help="Upload; without it, only show what would be.")] = False,
    public: Annotated[bool, typer.Option("--public", help="A new repository can be read by everybody.")] = False,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Where the run was charged; by default the ledger of its configuration, or else its own."),
    ] = None,
    public_data: Annotated[
        bool, typer.Option("--public-data", help="The records are public, as the run's configuration says too.")
    ] = False,
    license: License = "",
    as_json: AsJson = False,
) -> None:
    """Upload a variant to the Hugging Face Hub. Without --yes it lists the files, and what they cost every holder.

    The global models of a private run may go out. A holder's own variant needs that holder's permission in the ledger,
    see `fedpriv ledger permit`. Neither configuration, ledger nor provenance is uploaded.

    Example: fedpriv push results/20261121-042553-embedded clinic/letters

    Example: fedpriv push results/20261121-042553-embedded clinic/letters --variant client-2 --yes
    """
    from fedpriv.publishing import hub, saved

    hub.check_name(name)
    found = saved.find(source, variant=variant)
    reason = hub.why_publishable(found, ledger=ledger, public_data=public_data)
    contents = hub.contents(found, license=license)
    sizes = [{"file": path, "bytes": len(content)} for path, content in contents.items()]
    holders = _holders(found)
    address = hub.upload(name, contents, public=public) if yes else None
    values: dict[str, Any] = {"variant": found.name, "name": name, "uploaded": yes, "address": address}
    values |= {"allowed": reason, "files": sizes, "holders": holders}
    lines = [
        f"{found.name} to {name}, {'public' if public else 'private'} if it is new",
        f"allowed: {reason}",
        *("", *table(sizes, ("file", "bytes"))),
        *("", "what the run, and with it this variant, has cost every holder:"),
        *table(holders, ("client", "epsilon_local", "epsilon_rho", "epsilon_aggregate", "delta")),
        *("", f"uploaded: {address}" if yes else "nothing was uploaded; add --yes to do it"),
    ]
    show(values, lines, as_json)


def _holders(found: Any) -> list[dict[str, Any]]:
    from fedpriv.runs import files

    clients = files.read_values(found.run / files.SUMMARY)["clients"]
    keys = ("client", "epsilon_local", "epsilon_rho", "epsilon_aggregate", "delta")
    return [{key: client.get(key) for key in keys} for client in clients]
