"""`fedpriv serve ...`: the variants of a run or a store over HTTP."""

from __future__ import annotations

import logging
import sys
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import click
import typer
from typer.core import TyperGroup

from fedpriv.cli._command import AsJson, Result, command, one_of, show
from fedpriv.errors import InputError


class _ServesByDefault(TyperGroup):
    """`fedpriv serve FOLDER` means `fedpriv serve run FOLDER`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """The arguments with the command's name, where another one is not named."""
        if args and args[0] not in (*self.commands, "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(cls=_ServesByDefault, no_args_is_help=True, help="Answer requests for many variants of one model.")


@app.command()
def run(
    source: Annotated[Path, typer.Argument(help="Folder of a run, or of a store of its variants.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.", min=0, max=65535)] = 8000,
    socket: Annotated[Path | None, typer.Option(help="Unix socket to listen on, instead of host and port.")] = None,
    memory: Annotated[str, typer.Option(help="Bound on the variants in memory, such as 2GB.")] = "2GB",
    model: Annotated[str, typer.Option(help="The base model; by default the one that the run names.")] = "",
    base_dtype: Annotated[
        Any, one_of("fedpriv.config:BaseFormat", "Format of the base; auto takes the run's.")
    ] = "auto",
    tokens: Annotated[Path | None, typer.Option(help="File of bearer tokens, see `fedpriv serve new-token`.")] = None,
    alias: Annotated[
        list[str] | None, typer.Option(help="Another name of a variant, NAME=VARIANT; may be given again.")
    ] = None,
    nginx: Annotated[
        Path | None,
        typer.Option(help="File to write the configuration of an nginx to that lets other machines ask, for conf.d/."),
    ] = None,
    nginx_port: Annotated[int, typer.Option(help="Port of that nginx.", min=1, max=65535)] = 443,
    certificate: Annotated[Path | None, typer.Option(help="PEM file of its certificate.")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key.")] = None,
    behind_proxy: Annotated[
        bool, typer.Option("--behind-proxy", help="Listen beyond this machine: another proxy protects the way here.")
    ] = False,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.", min=1)] = 256,
    queue: Annotated[int, typer.Option(help="Requests that may wait.", min=1)] = 256,
    inputs: Annotated[int, typer.Option(help="Texts or prompts in one request.", min=1)] = 64,
    body_bytes: Annotated[int, typer.Option(help="Longest body of a request.", min=1)] = 2**18,
    requests_per_token: Annotated[int, typer.Option(help="Requests of one token that are under way.", min=1)] = 64,
    inputs_per_token: Annotated[
        int, typer.Option(help="Texts or prompts of one token's requests that are under way, together.", min=1)
    ] = 128,
    connections_per_address: Annotated[
        int, typer.Option(help="At nginx, connections of one address, and its requests in a second.", min=1)
    ] = 64,
    drain_seconds: Annotated[
        float, typer.Option(help="After SIGTERM, how long to finish what is under way.", min=0.1)
    ] = 30.0,
    as_json: AsJson = False,
) -> None:
    """Serve the variants of a run or store, by OpenAI's API; the word `run` may be left out.

    SIGTERM finishes what is under way and ends with 0; SIGHUP reads the tokens again.

    Example: fedpriv serve run results/20261121-042553-embedded --port 8000 --memory 2GB
    """
    serving_app, server = _serve_modules()
    from fedpriv.files import replace_file
    from fedpriv.models.serving.http.limits import RequestLimits
    from fedpriv.models.serving.http.server import nginx_configuration
    from fedpriv.models.serving.http.tokens import Tokens
    from fedpriv.texts import parse_bytes

    limits = RequestLimits(
        body_bytes=body_bytes,
        num_inputs=inputs,
        max_new_tokens=max_new_tokens,
        requests_per_token=requests_per_token,
        inputs_per_token=inputs_per_token,
        connections_per_address=connections_per_address,
        drain_seconds=drain_seconds,
    )
    address = server.Address(host=host, port=port, path=socket)
    address.check(has_tokens=tokens is not None, behind_proxy=behind_proxy)
    known, aliases = Tokens(tokens), _aliases(alias or [])
    memory_bytes = parse_bytes(memory)
    if not source.is_dir():
        raise InputError(f"source = {str(source)!r}: must be the folder of a run or a store")
    if nginx is None and (certificate or key):
        raise InputError("certificate, key: are for the nginx of --nginx FILE, which speaks TLS; give that too")
    if nginx is not None:
        if tokens is None or certificate is None or key is None:
            raise InputError(f"nginx = {str(nginx)!r}: other machines will ask; give --tokens, --certificate and --key")
        made = nginx_configuration(address, limits, port=nginx_port, certificate=certificate, key=key)
        replace_file(nginx, made.encode())
    address.check_free()
    _log_to_stderr()

    from fedpriv.models.serving.http.cards import Cards, check_aliases
    from fedpriv.models.serving.requests import BASE  # which the loaded base decides about
    from fedpriv.models.serving.scheduler import open_serving

    typer.echo(f"loading {source} ...", err=True)
    started = time.monotonic()
    serving = open_serving(
        source,
        memory_bytes=memory_bytes,
        max_waiting=queue,
        base_dtype=base_dtype,
        model=model,
        check=partial(check_aliases, {alias: name for alias, name in aliases.items() if name != BASE}),
    )
    typer.echo(f"loaded {serving.model_name} in {time.monotonic() - started:.1f} s", err=True)

    def tell(url: str) -> None:
        num_variants = len(serving.names) - serving.has_base
        values = {"url": url, "num_variants": num_variants, "task": serving.task, "tokens": known.are_required}
        needed = "tokens are required" if known.are_required else "no token is required"
        line = f"{url} serves {num_variants} variants of {serving.model_name} from {serving.origin}; {needed}"
        show({**values, "origin": serving.origin}, [line], as_json)
        sys.stdout.flush()

    try:
        application = serving_app.create_app(serving, Cards(source), known, limits, aliases)
        server.run(application, known, limits, address, tell)
    finally:
        serving.close()


@command(app)
def new_token(
    name: Annotated[str, typer.Argument(help="Name of the token, for your own use.")],
    tokens: Annotated[Path, typer.Option(help="The file to add it to; created if it is missing.")],
    variants: Annotated[
        str, typer.Option(help="Names of variants, or patterns such as 'round-*', divided by commas.")
    ] = "",
    metrics: Annotated[bool, typer.Option("--metrics", help="It may read /metrics.")] = False,
) -> Result:
    """Make a bearer token, print it once, and add its digest to a file. A running server reads it after SIGHUP.

    Example: fedpriv serve new-token clinic --tokens tokens.toml --variants 'global,round-*'
    """
    from fedpriv.models.serving.http.tokens import add_new

    patterns = [pattern.strip() for pattern in variants.split(",") if pattern.strip()]
    if not patterns and not metrics:
        raise InputError("variants = '': name at least one, or give --metrics")
    secret = add_new(tokens, name, patterns, metrics=metrics)
    lines = [secret, f"{tokens} has its digest only: this is the one time that the token is shown"]
    return Result({"name": name, "token": secret, "variants": patterns, "metrics": metrics}, lines)


def _aliases(given: list[str]) -> dict[str, str]:
    """{other name: variant} of the option's values."""
    found: dict[str, str] = {}
    for each in given:
        name, equals, variant = each.partition("=")
        if not equals or name in found:
            raise InputError(f"alias = {each!r}: must be NAME=VARIANT, and each name once")
        found[name] = variant
    return found


def _serve_modules() -> Any:
    """The application and the server, or one line that says which extra they need."""
    try:
        from fedpriv.models.serving.http import app as serving_app
        from fedpriv.models.serving.http import server
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("fastapi", "starlette", "uvicorn", "prometheus_client", "h11"):
            raise
        raise InputError(f"serve: needs {error.name}; install it with pip install 'fedpriv[serve]'") from None
    return serving_app, server


def _log_to_stderr() -> None:
    """The server's log, a line for each event; uvicorn writes there too, warnings and worse."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    for logger, level in (("fedpriv", logging.INFO), ("uvicorn", logging.ERROR)):
        logging.getLogger(logger).addHandler(handler)
        logging.getLogger(logger).setLevel(level)
