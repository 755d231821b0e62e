"""The configuration of an nginx in front of a server: TLS, deadlines and bounds for each address.

The file belongs into nginx's `conf.d/`. nginx answers for what is slow, broken or too much before any of it comes here.
"""

from __future__ import annotations

import json
import re
import ssl
import stat
from pathlib import Path

from fedpriv.errors import InputError
from fedpriv.models.serving.http.limits import RequestLimits
from fedpriv.models.serving.http.refusals import RefusalError
from fedpriv.models.serving.http.server import Address

# Of what nginx writes as it is; a path with a space, a quote or a dollar sign would mean something else there.
_PATH = re.compile(r"[A-Za-z0-9/._@+-]+")

_TEMPLATE = """\
# Written by `fedpriv serve --nginx`, for conf.d/ of nginx >= 1.18.
limit_req_zone $binary_remote_addr zone=fedpriv_requests:4m rate={per_address}r/s;
limit_conn_zone $binary_remote_addr zone=fedpriv_connections:4m;
limit_conn_zone $server_port zone=fedpriv_all:1m;

upstream fedpriv {{
    server {upstream};
    keepalive 32;
}}

server {{
    listen {port} ssl;
    listen [::]:{port} ssl;
    server_name _;
    server_tokens off;
    ssl_certificate {certificate};
    ssl_certificate_key {key};
    ssl_protocols TLSv1.2 TLSv1.3;

    client_header_timeout 10s;
    client_body_timeout 10s;
    send_timeout 30s;
    keepalive_timeout 5s;
    reset_timedout_connection on;
    client_max_body_size {body_bytes};
    # A prompt is never written to a disk.
    client_body_buffer_size {body_bytes};
    proxy_max_temp_file_size 0;

    limit_req zone=fedpriv_requests burst={per_address} nodelay;
    limit_conn fedpriv_connections {per_address};
    limit_conn fedpriv_all 400;
    limit_req_status 429;
    limit_conn_status 429;

    location / {{
        proxy_pass http://fedpriv;
        proxy_http_version 1.1;
        proxy_set_header Connection "";
        proxy_set_header Host $host;
        proxy_read_timeout 600s;
        # Answers are taken at once, however slowly they are read, but for streams, whose X-Accel-Buffering forbids it.
        proxy_buffering on;
    }}
{refusals}}}
"""

_REFUSAL = """
    error_page {statuses} ={status} /_refused/{status};
    location = /_refused/{status} {{
        internal;
        default_type application/json;
        add_header Cache-Control no-store always;
        return {status} '{body}';
    }}
"""

# {status: (statuses of nginx that become it, code, message)}, in the shape of all other errors.
_REFUSALS = {
    400: ("400 501 505", "invalid_http", "This is not a valid HTTP request."),
    405: ("405", "wrong_method", "This address takes another method."),
    408: ("408", "slow_request", "The request did not come in time."),
    413: ("413", "body_too_large", "The body is too long."),
    414: ("414", "invalid_http", "The address is too long."),
    429: ("429", "too_many_requests", "This address asks too much at once; try again in a moment."),
    431: ("431 494", "head_too_large", "The headers are too long."),
    502: ("502 503 504", "not_there", "The server does not answer; try again later."),
}


def configuration(address: Address, limits: RequestLimits, *, port: int, certificate: Path, key: Path) -> str:
    """The configuration of an nginx that listens on a port for other machines.

    Args:
        certificate: PEM file of the certificate and those that sign it.
        key: PEM file of its key.

    Raises:
        InputError: the address has no fixed port, a path cannot be written there, or the certificate not be used.
    """
    if address.path is None and not address.port:
        raise InputError("port = 0: nginx has to know it; give --port or --socket")
    _check_certificate(certificate, key)
    host = f"[{address.host}]" if ":" in address.host else address.host
    upstream = f"unix:{_written(address.path)}" if address.path else f"{host}:{address.port}"
    refusals = [
        _REFUSAL.format(
            statuses=statuses, status=status, body=json.dumps(RefusalError(status, message, code=code).as_dict())
        )
        for status, (statuses, code, message) in _REFUSALS.items()
    ]
    return _TEMPLATE.format(
        upstream=upstream,
        port=port,
        certificate=_written(certificate),
        key=_written(key),
        body_bytes=limits.body_bytes,
        per_address=limits.connections_per_address,
        refusals="".join(refusals),
    )


def _written(path: Path) -> str:
    found = str(path.absolute())
    if not _PATH.fullmatch(found):
        raise InputError(f"path = {found!r}: for nginx it must be of letters, digits and / . _ @ + - alone")
    return found


def _check_certificate(certificate: Path, key: Path) -> None:
    try:
        if stat.S_IMODE(key.stat().st_mode) & stat.S_IRWXO:
            raise InputError(f"key = {str(key)!r}: anyone on this machine can open it; run chmod o= on it")
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise InputError(f"certificate, key = {str(certificate)!r}, {str(key)!r}: cannot be used ({reason})") from None
