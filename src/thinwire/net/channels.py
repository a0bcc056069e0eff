"""The set-up of gRPC at both ends: mutual TLS with keys of the hub's authority, and bounds for messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from thinwire.errors import ConfigurationError, LinkError
from thinwire.net.frames import LIMIT_NBYTES
from thinwire.net.keys import HUB, Credentials

LEAST_GRPCIO = "1.85"  # the first grpcio that says which version of TLS a connection has
if tuple(map(int, grpc.__version__.split(".")[:2])) < tuple(map(int, LEAST_GRPCIO.split("."))):
    raise ConfigurationError(
        f"grpcio {grpc.__version__} is installed, which does not say whether a connection has TLS 1.3; pip install 'grpcio>={LEAST_GRPCIO}'."
    )

SERVICE = "thinwire.Hub"
_METHODS = "Renew", "Control", "Bulk", "Meet", "Follow", "Publish"
RENEW, CONTROL, BULK, MEET, FOLLOW, PUBLISH = (f"/{SERVICE}/{name}" for name in _METHODS)
TLS = "TLSv1.3"
ANSWER_NBYTES = 1 << 23  # bytes of a response to a member: the presences of all members
_NO_COMPRESSION = 1  # the bit of `identity`

Options = Sequence[tuple[str, int | str]]
_BOTH: Options = (
    ("grpc.max_send_message_length", ANSWER_NBYTES),
    ("grpc.compression_enabled_algorithms_bitset", _NO_COMPRESSION),
    ("grpc.max_metadata_size", 8192),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
# gRPC also gives `keepalive_timeout_ms` to the kernel (TCP_USER_TIMEOUT), which ends a connection whose receiver had no room for so long.
# Behind a thin link bulk stands still for longer than the seconds above, so these bounds are minutes. `HubLink` and `Hub` notice silence
# on the control connection, which carries no bulk; the hub's pings there make a member that lives send bytes.
_FOR_BULK: Options = (
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 300_000),
    ("grpc.http2.ping_timeout_ms", 300_000),
)


def _impatient(seconds: float) -> Options:
    """Options that end a silent connection well within `seconds`. A ping is sent only after a silence of a fifth of that; its response may take
    half, which `Timeouts.of` makes long enough for bulk data queued before it.
    """
    answer = int(1000 * seconds / 2)
    return (
        ("grpc.keepalive_time_ms", int(1000 * seconds / 5)),
        ("grpc.keepalive_timeout_ms", answer),
        ("grpc.http2.ping_timeout_ms", answer),  # a minute by default, for any `keepalive_timeout_ms`
    )


OF_MEMBERS: Options = (  # of the hub's server for members
    *_BOTH,
    *_FOR_BULK,
    ("grpc.max_receive_message_length", LIMIT_NBYTES),
    ("grpc.max_concurrent_streams", 16),
    ("grpc.max_connection_idle_ms", 30_000),
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.min_ping_interval_without_data_ms", 200),
    ("grpc.so_reuseport", 0),
)


def server_credentials(own: Callable[[], Credentials]) -> grpc.ServerCredentials:
    """The end of the hub, with the key that `own` gives at each handshake, which refuses a peer without a
    certificate of the authority.
    """

    def configured(own: Credentials) -> grpc.ServerCertificateConfiguration:
        return grpc.ssl_server_certificate_configuration([(own.key, own.certificate)], own.authorities)

    now = own()

    def renewed() -> grpc.ServerCertificateConfiguration | None:
        nonlocal now
        if (due := own()) is now:
            return None  # the one in use
        now = due
        return configured(due)

    return grpc.dynamic_ssl_server_credentials(configured(now), renewed, True)


def dial(
    host: str,
    port: int,
    authorities: bytes,
    own: Credentials,
    most_nbytes: int = LIMIT_NBYTES,
    silent: float | None = None,
) -> grpc.aio.Channel:
    """A separate connection to the hub, which must show a certificate of `authorities`. With `silent` it ends within so many seconds if
    nothing reaches the hub, although no connection was closed. Without it, after minutes, as connections with bulk need.
    """
    credentials = grpc.ssl_channel_credentials(authorities, own.key, own.certificate)
    options = [
        *_BOTH,
        *(_FOR_BULK if silent is None else _impatient(silent)),
        ("grpc.max_receive_message_length", most_nbytes),
        ("grpc.ssl_target_name_override", HUB),
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", 0),
    ]
    target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return grpc.aio.secure_channel(target, credentials, options)


def check_tls(context: Any) -> None:
    """Raise `LinkError` if a call did not use TLS 1.3."""
    (version,) = context.auth_context().get("ssl_tls_version", [b"no TLS"])
    if version.decode() != TLS:
        raise LinkError(f"the connection uses {version.decode()}; {TLS} is needed")
