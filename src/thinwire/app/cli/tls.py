"""TLS of the verbs that use gRPC, before it is imported."""

import os


def set_up_grpc() -> None:
    """Have gRPC accept only TLS 1.3, and print nothing. It reads these variables when it is imported, and has no options for it."""
    os.putenv("GRPC_SSL_CIPHER_SUITES", "ECDHE-RSA-AES128-GCM-SHA256")  # of TLS 1.2, and a P-256 key cannot use it
    os.putenv(
        "GRPC_VERBOSITY", "NONE"
    )  # it would print a line for each stranger; the hub counts them, and all other errors are raised
