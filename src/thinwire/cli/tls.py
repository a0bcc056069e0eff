"""TLS of the verbs that use gRPC, before it is imported."""

import os


def accept_only_tls13() -> None:
    """Have gRPC accept only TLS 1.3. It reads this variable when it is imported, and has no option for it."""
    os.putenv("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")  # of TLS 1.2, and a P-256 key cannot use it
