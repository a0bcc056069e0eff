"""Identifies the members that call the hub by their certificates, and checks what their names and invitations permit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cryptography import x509

from thinwire.errors import LinkError
from thinwire.net.calls import Outdated
from thinwire.net.channels import check_tls
from thinwire.net.fetch import FOLLOWER
from thinwire.net.keys import Authorities, key_digest, member_name
from thinwire.net.proxy import TcpProxy
from thinwire.net.state import HubState


class Callers:
    """Identifies members.

    Args:
        state, authorities: those of the hub.
    """

    def __init__(self, state: HubState, authorities: Authorities) -> None:
        self._state, self.authorities = state, authorities
        self.proxy: TcpProxy | None = None  # the proxy for members; set by the hub

    def identify(self, context: Any) -> tuple[str, float]:
        """The name of the calling member, and the end of its certificate. Raises `LinkError`."""
        check_tls(context)
        (pem,) = context.auth_context().get("x509_pem_cert", [b""])
        try:
            certificate = x509.load_pem_x509_certificate(pem)
        except ValueError:
            raise LinkError("no certificate was presented") from None
        name = member_name(certificate)
        if certificate.issuer != self.authorities.issuer.certificate.subject:
            raise Outdated("the hub has a new authority, which renews this certificate")
        self.check_key(name, certificate)
        assert self.proxy
        self.proxy.authenticated(context.peer(), name)
        return name, certificate.not_valid_after_utc.timestamp()

    def check_key(self, name: str, holder: x509.Certificate | x509.CertificateSigningRequest) -> None:
        """Raise `LinkError` unless `holder` has the key of the member `name`, which is not revoked."""
        known = self._state.member(name)
        if known is None or known.key != key_digest(holder):
            raise LinkError(f"the name {name} belongs to another key")
        if known.revoked:
            raise LinkError(f"{name} is revoked")

    def trainer(self, context: Any) -> tuple[str, float]:
        """Like `identify`, for requests that followers must not make."""
        name, expires = self.identify(context)
        if name.startswith(FOLLOWER):
            raise LinkError(f"{name} is a follower, which receives only; join with a token for another name")
        return name, expires

    def check_bound(self, name: str, asked: Callable[[str], bool]) -> None:
        """Raise `LinkError` if the member's invitation names certain runs, and none of them is `asked`."""
        bound = self._state.bound(name)
        if bound and not any(map(asked, bound)):
            raise LinkError(
                f"{name} was invited to {', '.join(bound)} and may join no other run: thinwire join --group {bound[0]}"
            )
